"""Puts an emulated operator behind torch_npu's own schema, and holds every call of it to what torch_npu knows.

A call goes through torch_npu's schema, so a wrong keyword fails there. It then runs torch_npu's own Meta kernel, where
there is one, and what that says of shapes and dtypes must be what the emulation gives.
"""

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from enum import Enum

import torch
from torch.utils._pytree import tree_map_only


class UndocumentedCall(Exception):
    """A call outside of what the operator's documentation allows: on a device, anything may happen."""


class Limits(Enum):
    """What is enforced. STRICT: all that is documented. RELAXED: that, but fp32 is taken wherever bf16 is."""

    STRICT = "strict"
    RELAXED = "relaxed"


OPERATORS: dict[str, Callable] = {}
# Of these torch_npu has no Meta kernel: their calls are held to the schema alone.
NEVER_CHECKED_BY_META: set[str] = set()

# How often each operator was called since the mode was entered.
calls: Counter[str] = Counter()
_limits = Limits.STRICT
_libraries = {namespace: torch.library.Library(namespace, "IMPL") for namespace in ("npu", "atb")}


@contextlib.contextmanager
def mode(limits: Limits) -> Iterator[Counter[str]]:
    """Sets what is enforced, and counts calls."""
    global _limits
    before, _limits = _limits, limits
    calls.clear()
    try:
        yield calls
    finally:
        _limits = before


def require(condition: bool, limit: str) -> None:
    """Raises UndocumentedCall unless the condition holds. limit: what the documentation says."""
    if not condition:
        raise UndocumentedCall(limit)


def require_dtype(tensor: torch.Tensor, *dtypes: torch.dtype, what: str) -> None:
    """One of the documented dtypes, or fp32 where that is let through."""
    if _limits is Limits.RELAXED and torch.bfloat16 in dtypes:
        dtypes = (*dtypes, torch.float32)
    require(tensor.dtype in dtypes, f"{what} is {' or '.join(map(str, dtypes))}, not {tensor.dtype}")


def require_contiguous(**tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        require(tensor is None or tensor.is_contiguous(), f"{name} must be contiguous")


def emulates(name: str, meta_wants: int = 0) -> Callable[[Callable], Callable]:
    """Makes the decorated function the CPU kernel of the operator, such as "npu::npu_swiglu".

    meta_wants: of how many arguments torch_npu's Meta kernel wants values, though the schema has defaults for them.
    """
    namespace, operator = name.split("::")
    overload = getattr(getattr(torch.ops, namespace), operator).default
    has_meta = torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta")
    if not has_meta:
        NEVER_CHECKED_BY_META.add(name)

    def register(emulation: Callable) -> Callable:
        _check_signature(emulation, overload._schema)

        def run(*args, **kwargs):
            calls[name] += 1
            ask_meta = has_meta and len(args) >= meta_wants
            expected = overload(*_on_meta(args), **_on_meta(kwargs)) if ask_meta else None
            result = emulation(*args, **kwargs)
            if ask_meta:
                _check_result(name, result, expected)
            return result

        _libraries[namespace].impl(operator, run, "CPU")
        OPERATORS[name] = emulation
        return emulation

    return register


def _check_signature(emulation: Callable, schema: torch.FunctionSchema) -> None:
    """An emulation must name its parameters as the operator does, with the same defaults."""
    has = {
        name: parameter.default
        for name, parameter in inspect.signature(emulation).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    }
    wanted = {argument.name: _default(argument) for argument in schema.arguments}
    differing = {name: default for name, default in has.items() if wanted.get(name, ...) != default}
    if differing:
        raise TypeError(f"{schema.name} takes {wanted}, but its emulation {differing}")


def _default(argument: torch.Argument):
    return argument.default_value if argument.has_default_value() else inspect.Parameter.empty


def _on_meta(values):
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), values)


def _check_result(name: str, result, expected) -> None:
    def shapes(values) -> list[tuple]:
        values = values if isinstance(values, tuple) else (values,)
        return [(tuple(value.shape), value.dtype) for value in values if value is not None]

    if shapes(result) != shapes(expected):
        raise AssertionError(f"the emulation of {name} gives {shapes(result)}, torch_npu says {shapes(expected)}")
