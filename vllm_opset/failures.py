"""A note for exceptions that a kernel raises: the op, the kernel, and the shape and strides of each argument."""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch

from vllm_opset import ops
from vllm_opset.kernel import Kernel


def explained(kernel: Kernel, run: Callable) -> Callable:
    """`run` with a note on every exception. The exception is raised again: no other kernel is tried."""

    @functools.wraps(run)
    def explained(*args, **kwargs):
        try:
            return run(*args, **kwargs)
        except Exception as error:
            error.add_note(
                f"vllm-opset: {kernel} of {kernel.provider} raised this for {given(kernel.op, args, kwargs)}"
            )
            raise

    return explained


def given(op: str, args: tuple, kwargs: dict) -> str:
    """The arguments of a call of an op as text. No tensor is read, because its device may have failed."""
    names = [*ops.BY_NAME[op].signature.parameters]
    named = [*zip(names, args, strict=False), *kwargs.items()]
    return "; ".join(text for name, value in named for text in _words(name, value))


def _words(name: str, value: object) -> Iterator[str]:
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        yield f"{name} {kind} {list(value.shape)}, strides {list(value.stride())}, {value.device}"
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.repr:
                yield from _words(f"{name}.{field.name}", getattr(value, field.name))
    else:
        yield f"{name} {value!r}"
