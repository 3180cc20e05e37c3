"""Sizes of memory as text."""

GIB = 2**30


def gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
