"""The choice of one kernel for an op and a problem. It is made once, with the reason.

A layer or a backend calls `select` when it is built and keeps the result. During a call, only the kernel's own table of
`variants` decides. A kernel that fails raises, with a note of its arguments (`failures`). Users override the choice
(`overrides` lists the ways). OPSET_IMPORT="module,…" imports modules with the user's own kernels, which run only if an
override names them. OPSET_COUNT_CALLS=1 counts the calls of every kernel, for reports.
"""

import functools
import importlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vllm_opset import devices, failures, ops, overrides
from vllm_opset.kernel import PROVIDERS, REFERENCE, Kernel, kernels_of, load
from vllm_opset.ops.contract import Op, Problem
from vllm_opset.overrides import OverrideError, nearest

# The providers to try on a device, first to last. The reference comes last in every list: it runs anywhere.
PREFERENCE: Mapping[str, tuple[str, ...]] = {"cpu": ("cpp", "cpu"), "cuda": ("triton",), "npu": ("ascend",)}


@dataclass(frozen=True)
class Override:
    """A user's override for one op: the kernel's name, the source of the override, and a variant or None."""

    kernel: str
    source: str
    variant: str | None = None


@dataclass(eq=False)
class Choice:
    """The kernel chosen for an op and a problem, with the reason and the reasons against the others.

    Call `run`. An argument that the op declares as prepared goes through `kernel.prepared` once before. calls: how many
    calls each variant ran, if they are counted.
    """

    op: str
    problem: Problem
    kernel: Kernel
    reason: str
    rejected: tuple[tuple[str, str], ...]
    variant: str | None = None
    calls: Counter = field(default_factory=Counter)
    run: Callable = field(init=False, repr=False)

    def __post_init__(self) -> None:
        run = self.kernel.run if self.variant is None else functools.partial(self.kernel.run, variant=self.variant)
        self.run = failures.explained(self.kernel, self._counted(run) if overrides.counts_calls() else run)

    @property
    def name(self) -> str:
        """The kernel's name, with the variant that an override asks for."""
        return self.kernel.name if self.variant is None else f"{self.kernel.name}:{self.variant}"

    def _counted(self, run: Callable) -> Callable:
        """`run`, counted by variant."""
        variants = self.kernel.variants

        @functools.wraps(self.kernel.run)
        def counted(*args, **kwargs):
            self.calls[None if variants is None else variants.of(self.variant, *args, **kwargs)] += 1
            return run(*args, **kwargs)

        return counted


Choices = dict[tuple[str, Problem, Override | None], Choice]

_overrides: dict[str, Override] | None = None
_choices: Choices = {}


def configure(additional_config: Mapping | None = None) -> dict[str, Override]:
    """Read the user's overrides from every source. Raises OverrideError for wrong overrides and unknown settings.

    Earlier choices remain, because vLLM checks its configuration more than once. An op whose override has changed gets
    a new choice. additional_config: vLLM's own, whose key "opset" is ours.
    """
    global _overrides
    additional_config = additional_config or {}
    overrides.check(additional_config)
    _import_users_kernels()
    _overrides = _read_overrides(additional_config)
    return _overrides


def require_device(device: str) -> None:
    """Raise OverrideError if an override names a kernel that does not run on this type of device at all."""
    for name, override in (configure() if _overrides is None else _overrides).items():
        kernels = kernels_of(name)
        if not (kernel := kernels[override.kernel]).runs_on(device):
            able = ", ".join(sorted(other.name for other in kernels.values() if other.runs_on(device)))
            raise OverrideError(
                f"{override.source} asks for {kernel}, which runs on {', '.join(kernel.devices)}, not on {device}. "
                f"Remove that override, or name a kernel that does: {able}"
            )


def select(op: Op, problem: Problem) -> Choice:
    """The kernel for `op` on `problem`: the user's override if there is one, else the first that supports the problem.

    Kernels are tried in the order of PREFERENCE. Raises OverrideError if the override names a kernel that does not
    support the problem.
    """
    override = (configure() if _overrides is None else _overrides).get(op.name)
    key = (op.name, problem, override)
    if key not in _choices:
        _choices[key] = _decide(op, problem, override)
    return _choices[key]


def forget() -> Choices:
    """Start a new set of choices for an engine, and return it. It stays valid when the next engine has started.

    An engine is built before the next one of its process starts, so their choices do not mix.
    """
    global _choices
    _choices = {}
    return _choices


def choices(made: Choices | None = None) -> list[Choice]:
    """All choices of an engine, in the order of the ops.

    made: the engine's set, from `forget`. Without it, the choices are the latest engine's under the current overrides.
    """
    order = [op.name for op in ops.ALL]
    by_now = _overrides or {}
    found = [
        choice
        for (op, _, override), choice in (_choices if made is None else made).items()
        if made is not None or override == by_now.get(op)
    ]
    return sorted(found, key=lambda choice: order.index(choice.op))


def why_no_kernel(op: Op, problem: Problem) -> str | None:
    """Why only the reference supports the problem on its device, or None if a kernel does. It makes no choice."""
    known = kernels_of(op.name, device=problem.device)
    kernels = [k for k in _in_order_of_preference(known, problem) if k.provider != REFERENCE]
    reasons = [_why_not(kernel, problem) for kernel in kernels]
    if None in reasons:
        return None
    return reasons[0] if reasons else f"there is no kernel for {problem.device} here"


def _decide(op: Op, problem: Problem, override: Override | None) -> Choice:
    kernels = kernels_of(op.name, device=None if override else problem.device)
    if override is not None:
        chosen, reason = _obey(kernels, problem, override), f"asked for by {override.source}"
    else:
        chosen = next(kernel for kernel in _in_order_of_preference(kernels, problem) if not _why_not(kernel, problem))
        reason = _why(chosen, problem)
    others = [kernel for kernel in kernels.values() if kernel is not chosen and kernel.runs_on(problem.device)]
    rejected = ((k.name, _why_not(k, problem) or _why_after(k, chosen, problem, override)) for k in others)
    return Choice(op.name, problem, chosen, reason, tuple(rejected), None if override is None else override.variant)


def _obey(kernels: Mapping[str, Kernel], problem: Problem, override: Override) -> Kernel:
    kernel = kernels[override.kernel]
    reason = _why_not(kernel, problem)
    if reason is not None:
        able = sorted(other.name for other in kernels.values() if _why_not(other, problem) is None)
        raise OverrideError(
            f"{override.source} asks for {kernel}, which cannot do it: {reason} ({problem}). "
            f"Remove that override, or name a kernel that can: {', '.join(able)}"
        )
    return kernel


def _in_order_of_preference(kernels: Mapping[str, Kernel], problem: Problem) -> list[Kernel]:
    order = _providers(problem.device)
    return sorted((k for k in kernels.values() if k.provider in order), key=lambda kernel: order.index(kernel.provider))


def _providers(device: str) -> tuple[str, ...]:
    return (*PREFERENCE.get(device, ()), REFERENCE)


def _why(kernel: Kernel, problem: Problem) -> str:
    if kernel.provider != REFERENCE:
        return f"first kernel for {problem.device} that supports it"
    return f"no other kernel for {problem.device} supports it"


def _why_not(kernel: Kernel, problem: Problem) -> str | None:
    if not kernel.runs_on(problem.device):
        return f"it runs on {', '.join(kernel.devices)}, not on {problem.device}"
    return kernel.supports(problem)


def _why_after(kernel: Kernel, chosen: Kernel, problem: Problem, override: Override | None) -> str:
    """Why a kernel was not chosen although it supports the problem."""
    if override is not None:
        return f"{override.source} asks for {chosen.name}"
    if kernel.provider not in _providers(problem.device):
        return "it runs where an override names it"
    return f"{chosen.name} comes first"


def _import_users_kernels() -> None:
    for module in overrides.comma_separated("OPSET_IMPORT"):
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:  # a script may end at its import
            raise OverrideError(
                f"OPSET_IMPORT: importing {module!r} raised {type(error).__name__}: {error}. "
                "Fix it, put its folder on PYTHONPATH, or take it out of OPSET_IMPORT"
            ) from error


def _read_overrides(additional_config: Mapping) -> dict[str, Override]:
    """The kernel that users ask for, by op; a later source overrides an earlier one."""
    found: dict[str, Override] = {}
    for source, op_name, value in overrides.settings("kernels", additional_config):
        kernel_name, colon, variant = str(value).partition(":")
        override = Override(kernel_name, source, variant if colon else None)
        _check_names(op_name, override)
        found[op_name] = override
    return found


def _check_names(op_name: object, override: Override) -> None:
    source, kernel_name, variant = override.source, override.kernel, override.variant
    if op_name not in ops.BY_NAME:
        raise OverrideError(f"{source}: unknown op {op_name!r}; {nearest(str(op_name), ops.BY_NAME)}")
    known = kernels_of(op_name)
    if kernel_name not in list(known):
        missing = load(kernel_name) if kernel_name in PROVIDERS else None
        hint = missing or nearest(kernel_name, [name for name in known if devices.run(known[name])])
        raise OverrideError(f"{source}: {op_name} has no kernel {kernel_name!r} here; {hint}")
    if variant is not None:
        _check_variant(source, known[kernel_name], variant)


def _check_variant(source: str, kernel: Kernel, variant: str) -> None:
    if kernel.variants is None:
        raise OverrideError(f"{source}: {kernel} has no variants; leave out {':' + variant!r}")
    known = kernel.variants.by_name
    if not variant:
        raise OverrideError(f"{source}: {kernel}: names no variant; leave out ':', or name one: {', '.join(known)}")
    if variant not in known:
        raise OverrideError(f"{source}: {kernel} has no variant {variant!r}; {nearest(variant, known)}")
