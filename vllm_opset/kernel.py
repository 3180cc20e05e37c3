"""The definition of a kernel, which is one implementation of one op, and the registry of all kernels.

A kernel file declares

    @kernel(ops.rms_norm, name="triton", supports=supports)
    def rms_norm(x, weight, epsilon, ...): ...

`supports(problem)` returns None, or in a few words the reason why the kernel does not support the problem. The function
reads only the problem: no environment, no data. `vllm-opset ops` shows the function's docstring. `selection` decides
which kernel runs.

A kernel may need an argument in its own format, for example a weight that is packed for its processor. It then names a
function for the conversion: `@kernel(…, prepare={"weight": pack})`. The conversion runs once, when a model is loaded,
and `run` gets only the result, which keeps the argument's shape. The op declares which of its parameters are prepared.
The function gets the others of these by name, if they are given: to pack a quantised weight takes its scale.
"""

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import Parameter
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from vllm_opset import ops
from vllm_opset.ops.contract import Op, Problem
from vllm_opset.variants import Variants

REFERENCE = "reference"
KERNELS = "vllm_opset.kernels"  # its modules import this one
PROVIDERS = tuple(module.name for module in pkgutil.iter_modules([str(Path(__file__).with_name("kernels"))]))

Supports = Callable[[Problem], str | None]


@dataclass(frozen=True)
class Kernel:
    """An implementation of an op.

    provider: the folder of `kernels/` it came from, or the user's module. devices: the torch device types that its
    provider runs on; () for any. prepare: for each prepared parameter, the function that converts its argument for
    `run`. variants: None if the kernel runs all calls alike.
    """

    op: str
    name: str
    provider: str
    devices: tuple[str, ...]
    supports: Supports = field(repr=False)
    run: Callable = field(repr=False)
    prepare: Mapping[str, Callable[..., torch.Tensor]] = field(default_factory=dict, repr=False, compare=False)
    variants: Variants | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.op}={self.name}"

    def runs_on(self, device: str) -> bool:
        """Whether the kernel's provider runs on this type of device at all."""
        return not self.devices or device in self.devices

    def prepared(self, parameter: str, argument: torch.Tensor, **others: Any) -> torch.Tensor:
        """The value to pass to `run` for an argument of the op. others: the op's other prepared arguments."""
        return self.prepare[parameter](argument, **others) if parameter in self.prepare else argument

    def prepared_call(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments of a call of the op, converted for `run`."""
        if not self.prepare:
            return args, kwargs
        op = ops.BY_NAME[self.op]
        bound = op.signature.bind(*args, **kwargs)
        given = {name: bound.arguments[name] for name in op.prepared if bound.arguments.get(name) is not None}
        for parameter, argument in given.items():
            others = {name: other for name, other in given.items() if name != parameter}
            bound.arguments[parameter] = self.prepared(parameter, argument, **others)
        return bound.args, bound.kwargs

    def call(self, *args, **kwargs):
        """Call the op once, preparing its arguments for this call only."""
        args, kwargs = self.prepared_call(args, kwargs)
        return self.run(*args, **kwargs)


def everything(problem: Problem) -> None:
    """Everything in the contract."""


_registry: dict[str, dict[str, Kernel]] = {
    op.name: {REFERENCE: Kernel(op.name, REFERENCE, REFERENCE, (), everything, op.reference)} for op in ops.ALL
}
_loaded: set[str] = set()


def kernel(
    op: Op,
    *,
    name: str,
    supports: Supports = everything,
    prepare: Mapping[str, Callable] | None = None,
    variants: Variants | None = None,
) -> Callable[[Callable], Callable]:
    """Register the decorated function as an implementation of `op`, with the signature of the op's reference.

    The function may have further parameters after those of the reference, if these have defaults. The function of a
    kernel with variants takes the name of the wanted one as `variant`. Raises ValueError if its signature differs
    otherwise, or if the op already has a kernel of that name. It also raises it if `prepare` names a parameter that the
    op's callers do not prepare, or if `supports` is no function. The kernel's `supports` raises it for a result that is
    neither None nor a reason.
    """
    unprepared = set(prepare or {}) - set(op.prepared)
    if unprepared:
        raise ValueError(f"callers of {op.name} do not prepare {sorted(unprepared)}; known: {', '.join(op.prepared)}")

    def register(run: Callable) -> Callable:
        if name in _registry[op.name]:
            raise ValueError(f"{op.name} already has a kernel named {name!r}, from {_registry[op.name][name].provider}")
        if wrong := list(_differences(op.signature, inspect.signature(run))):
            raise ValueError(
                f"{op.name}={name} has another signature than its op: {'; '.join(wrong)}. "
                f"Declare it as the op does: def {op.name}{_without_annotations(op.signature)}"
            )
        if variants is not None and "variant" not in inspect.signature(run).parameters:
            raise ValueError(f"{op.name}={name} has variants and no parameter `variant: str | None = None`")
        provider = _provider_of(run)
        devices = _package(provider).DEVICES if provider in PROVIDERS else ()
        checked = _with_reasons(supports, f"{op.name}={name}")
        _registry[op.name][name] = Kernel(op.name, name, provider, devices, checked, run, prepare or {}, variants)
        return run

    return register


def _with_reasons(supports: Supports, kernel: str) -> Supports:
    """The function, which raises ValueError for a result such as True. Its callers would take that as a reason."""
    if not callable(supports):
        raise ValueError(f"{kernel}: supports={supports!r} is no function. Leave it out for a kernel without limits")

    @functools.wraps(supports)
    def checked(problem: Problem) -> str | None:
        reason = supports(problem)
        if reason is None or (isinstance(reason, str) and reason):
            return reason
        raise ValueError(
            f"{kernel}: supports returned {reason!r}. Return None, or in words why it cannot do the problem"
        )

    return checked


def _differences(op: inspect.Signature, kernel: inspect.Signature) -> Iterator[str]:
    """The reasons why a valid call of the op would bind to other parameters or defaults of the kernel."""
    for name, wanted in op.parameters.items():
        found = kernel.parameters.get(name)
        if found is None:
            yield f"it has no parameter {name!r}"
        elif found.kind not in (wanted.kind, Parameter.POSITIONAL_OR_KEYWORD):
            yield f"{name!r} is {found.kind.description}, not {wanted.kind.description}"
        elif wanted.default is not Parameter.empty and found.default is Parameter.empty:
            yield f"{name!r} has no default, where the op's is {wanted.default!r}"
        elif wanted.default is not Parameter.empty and found.default != wanted.default:
            yield f"the default of {name!r} is {found.default!r}, not {wanted.default!r}"
    order = _positional(op)
    if (found_order := _positional(kernel)[: len(order)]) != order and set(order) <= set(kernel.parameters):
        yield f"by position it takes {', '.join(found_order)}, not {', '.join(order)}"
    for name, parameter in kernel.parameters.items():
        variadic = parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        if name not in op.parameters and parameter.default is Parameter.empty and not variadic:
            yield f"no call gives its parameter {name!r}, which has no default"


def _positional(signature: inspect.Signature) -> list[str]:
    """The parameters that can be passed by position, in their order."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, parameter in signature.parameters.items() if parameter.kind in kinds]


def _without_annotations(signature: inspect.Signature) -> inspect.Signature:
    parameters = [p.replace(annotation=Parameter.empty) for p in signature.parameters.values()]
    return inspect.Signature(parameters)


def kernels_of(op_name: str, elsewhere: bool = False, device: str | None = None) -> dict[str, Kernel]:
    """Every kernel of an op that is available on this machine, by name, in the order of registration.

    elsewhere: whether to add kernels of unavailable providers whose files say LISTED_ANYWHERE; they cannot run. device:
    only kernels for this type. Other providers are not checked for availability, because the check may compile them.
    """
    for provider in PROVIDERS:
        if device is not None and device not in _package(provider).DEVICES:
            continue
        if load(provider) is not None and elsewhere and getattr(_package(provider), "LISTED_ANYWHERE", False):
            _import_files(provider)
    absent = set(PROVIDERS) - _loaded
    return {
        name: known
        for name, known in _registry[op_name].items()
        if (elsewhere or known.provider not in absent) and (device is None or known.runs_on(device))
    }


def unavailable() -> dict[str, str]:
    """The providers whose kernels are unavailable on this machine, and why."""
    return {provider: reason for provider in PROVIDERS if (reason := why_unavailable(provider))}


def why_unavailable(provider: str) -> str | None:
    """Why a provider's kernels are unavailable on this machine, or None."""
    return _package(provider).unavailable()


def load(provider: str) -> str | None:
    """Import the kernel files of a provider, once. Returns None, or why the provider is unavailable here."""
    reason = why_unavailable(provider)
    if reason is None and provider not in _loaded:
        _import_files(provider)
        _loaded.add(provider)
    return reason


def _import_files(provider: str) -> None:
    for module in modules(provider):
        importlib.import_module(module)


def modules(provider: str) -> list[str]:
    """The kernel files of a provider, not imported. Raises ImportError for a file that is not named after an op."""
    package = _package(provider)
    names = [module.name for module in pkgutil.iter_modules(package.__path__) if not module.name.startswith("_")]
    for name in names:
        if name not in _registry:
            raise ImportError(f"{package.__name__}.{name} is named after no op: a kernel's file bears its op's name")
    return [f"{package.__name__}.{name}" for name in names]


def _package(provider: str) -> ModuleType:
    return importlib.import_module(f"{KERNELS}.{provider}")


def _provider_of(run: Callable) -> str:
    ours = run.__module__.startswith(f"{KERNELS}.")
    return run.__module__.removeprefix(f"{KERNELS}.").split(".")[0] if ours else run.__module__
