"""The calls that a function makes, recorded: those of the C++ library, and PyTorch's operators.

They can be made again, in their order and with the tensors that they had. Each writes its results where it wrote them
first. So the function is computed for what its inputs hold then, without the Python code between the calls.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm_opset.kernels.cpp._calls import Call, noted

# Operators of other libraries may have Python in them, and state.
NAMESPACES = {"aten", "mkldnn"}
MAKES_ROOM = {torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided, torch.ops.aten.new_empty}
UNSUITABLE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
# What gives Python the values of a tensor without an operator. What follows may depend on them.
READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__}


@dataclass
class Recording:
    """Calls that were made. reason: why they cannot be made again, or None.

    results: the tensors that they made, whose memory is kept.
    """

    calls: list[Call] = field(default_factory=list)
    results: list[torch.Tensor] = field(default_factory=list)
    reason: str | None = None

    def nbytes(self) -> int:
        return sum(result.untyped_storage().nbytes() for result in self.results)

    def replay(self) -> bool:
        """Make all calls again, up to one that returns something else, such as the place of a position without a row.

        Returns whether there was none.
        """
        return all(function(*args) == returned for function, args, returned in self.calls)


@contextmanager
def recorded() -> Iterator[Recording]:
    """Record all calls that this thread makes inside the context."""
    found = Recording()
    with ExitStack() as stack:
        for context in (noted(found.calls), _Operators(found), _Reads(found)):
            stack.enter_context(context)
        yield found


class _Operators(TorchDispatchMode):
    """Records PyTorch's operators that compute something."""

    def __init__(self, found: Recording) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _is_unsuitable(func, result):
            self.found.reason = self.found.reason or f"{func} is called"
        elif _writes(func):
            self._add(functools.partial(func, *args, **kwargs))
        elif not _is_view(args, result):
            self.found.results += _tensors(result)
            if func.overloadpacket not in MAKES_ROOM:
                self._add(_writing_again(func, args, kwargs, result))
        return result

    def _add(self, call: Callable) -> None:
        def again() -> None:
            call()

        self.found.calls.append(Call(again, (), None))


class _Reads(TorchFunctionMode):
    """Finds what reads the values of tensors without an operator."""

    def __init__(self, found: Recording) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in READS:
            self.found.reason = self.found.reason or f"{func.__name__} reads a tensor"
        return func(*args, **kwargs or {})


def _is_unsuitable(func, result: object) -> bool:
    """Whether an operator may give something else for other values, or has a result without a storage."""
    is_opaque = any(one.layout is not torch.strided for one in _tensors(result))
    return func.namespace not in NAMESPACES or bool(UNSUITABLE & set(func.tags)) or is_opaque


def _writes(func) -> bool:
    """Whether an operator changes an argument."""
    return any(one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments)


def _is_view(args: tuple, result: object) -> bool:
    """Whether all of a result lies in the memory of the arguments."""
    # Weights that oneDNN has packed have no storage.
    given = {one.untyped_storage().data_ptr() for one in _tensors(args) if one.layout is torch.strided}
    return all(one.untyped_storage().data_ptr() in given for one in _tensors(result))


def _writing_again(func, args: tuple, kwargs: dict, result: object) -> Callable:
    """A function that calls an operator again, and writes its result into the memory of the first one."""
    packet = func.overloadpacket
    if "out" in packet.overloads() and isinstance(result, torch.Tensor):
        inputs = [one.name for one in packet.out._schema.arguments if not one.is_out]
        if inputs == [one.name for one in func._schema.arguments]:
            return functools.partial(packet.out, *args, **kwargs, out=result)

    def copy() -> None:
        for old, new in zip(_tensors(result), _tensors(func(*args, **kwargs)), strict=True):
            old.copy_(new)

    return copy


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
