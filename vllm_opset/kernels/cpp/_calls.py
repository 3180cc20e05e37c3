"""Calls of the library's functions, which can be noted, and made again without Python's work around them.

A noted call has the addresses of tensors. Who notes it keeps their memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Call(NamedTuple):
    """A call that was made, and what it returned: None, or a number that tells of arguments that are not valid."""

    function: Callable
    args: tuple
    returned: int | None


_noted: list[Call] | None = None


class Function:
    """A function of the library."""

    __slots__ = ("code",)

    def __init__(self, code: Callable) -> None:
        self.code = code

    def __call__(self, *args) -> int | None:
        returned = self.code(*args)
        if _noted is not None:
            _noted.append(Call(self.code, args, returned))
        return returned


@contextmanager
def noted(calls: list[Call]) -> Iterator[None]:
    """Inside the context, add all calls to a list."""
    global _noted
    _noted = calls
    try:
        yield
    finally:
        _noted = None
