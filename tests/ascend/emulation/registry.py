"""Registers an emulated operator behind torch_npu's own schema, and checks every call against its known limits.

A call goes through torch_npu's schema, so a wrong keyword fails there. It then runs torch_npu's own Meta kernel if
there is one, and the emulation must return the same shapes and dtypes. The documented limits are checked by the same
functions that the kernels' `supports` calls.
"""

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from enum import Enum
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from vllm_opset import targets
from vllm_opset.kernels.ascend import _constraints as documented


class UndocumentedCall(Exception):
    """A call outside the operator's documentation: on a device, anything may happen."""


class Limits(Enum):
    """The limits that are enforced. STRICT: all documented limits. RELAXED: the same, but every operator takes fp32
    too.
    """

    STRICT = "strict"
    RELAXED = "relaxed"


# PyTorch's own numbers (c10::ScalarType).
SCALAR_TYPES = {1: torch.int8, 3: torch.int32, 5: torch.float16, 6: torch.float32, 15: torch.bfloat16}
OPERATORS: dict[str, Callable] = {}
_libraries = {namespace: torch.library.Library(namespace, "IMPL") for namespace in ("npu", "atb")}
_calls: Counter[str] = Counter()
_limits = Limits.STRICT


@contextlib.contextmanager
def mode(limits: Limits, device_name: str = "Ascend910B3") -> Iterator[Counter[str]]:
    """Sets the enforced limits, the name of the device and its target, and counts the calls of each operator."""
    global _limits
    before, _limits = _limits, limits
    _calls.clear()
    target = targets.Target("huawei", targets.soc(device_name), targets.npu_features())
    try:
        with patch("torch.npu.get_device_name", lambda device=None: device_name), targets.instead(target):
            yield _calls
    finally:
        _limits = before


def require(condition: bool, limit: str) -> None:
    """Raises UndocumentedCall unless the condition holds. limit: the documented limit."""
    if not condition:
        raise UndocumentedCall(limit)


def refuse(reason: str | None) -> None:
    """Raises UndocumentedCall if there is a reason against a call."""
    require(reason is None, reason or "")


def emulates(name: str, meta_wants: int = 0) -> Callable[[Callable], Callable]:
    """Makes the decorated function the CPU kernel of the operator, such as "npu::npu_swiglu".

    meta_wants: the number of arguments that torch_npu's Meta kernel needs although the schema has defaults for them.
    """
    namespace, operator = name.split("::")
    overload = getattr(getattr(torch.ops, namespace), operator).default
    has_meta = has_meta_kernel(name)

    def register(emulation: Callable) -> Callable:
        _check_signature(emulation, overload._schema)

        def run(*args, **kwargs):
            _calls[name] += 1
            _check_documented(operator, args, kwargs.get("output_dtype"))
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


def dtype_of(number: int) -> torch.dtype:
    """The dtype behind its number in torch_npu's schemas."""
    return SCALAR_TYPES[number]


def has_meta_kernel(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta")


def _check_documented(operator: str, args: tuple, output_dtype: int | None) -> None:
    """Checks product and dtype. The documents speak of the dtype of the first floating-point argument.

    If integers are multiplied, they speak of the dtype of the result, which the call then names.
    """
    limits, soc = documented.OPERATORS[operator], targets.of("npu").architecture
    require(soc in limits.socs, f"{operator} is documented for {limits.socs}, not for {soc}")
    first = (x.dtype for x in tree_leaves(args) if isinstance(x, torch.Tensor) and x.is_floating_point())
    dtype = next(first) if output_dtype is None else dtype_of(output_dtype)
    dtypes = limits.dtypes if _limits is Limits.STRICT else (*limits.dtypes, torch.float32)
    require(dtype in dtypes, f"{operator} takes {documented.names(dtypes)}, not {documented.names([dtype])}")


def _check_signature(emulation: Callable, schema: torch.FunctionSchema) -> None:
    """Checks that an emulation names its parameters as the operator does, with the same defaults."""
    parameters = inspect.signature(emulation).parameters.values()
    has = {parameter.name: parameter.default for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD}
    wanted = {argument.name: _default(argument) for argument in schema.arguments}
    if any(name not in wanted or wanted[name] != default for name, default in has.items()):
        raise TypeError(f"{schema.name} takes {wanted}, but its emulation {has}")


def _default(argument: torch.Argument):
    return argument.default_value if argument.has_default_value() else inspect.Parameter.empty


def _on_meta(values):
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), values)


def _check_result(name: str, result, expected) -> None:
    def shapes(values) -> list[tuple]:
        return [(tuple(value.shape), value.dtype) for value in tree_leaves(values) if value is not None]

    if shapes(result) != shapes(expected):
        raise AssertionError(f"the emulation of {name} gives {shapes(result)}, torch_npu says {shapes(expected)}")
