"""Index arithmetic and writes that several kernels share."""

from typing import NamedTuple

import torch


class Ragged(NamedTuple):
    """rows: the row of each element of rows of different lengths. places: its place in its row. int64, both."""

    rows: torch.Tensor
    places: torch.Tensor


def ragged(starts: torch.Tensor, count: int) -> Ragged:
    """The rows and places of the first `count` elements of rows that begin at `starts`, whose last value is the end.

    The device alone knows the lengths. Elements beyond the last row count as elements of the last one.
    """
    elements = torch.arange(count, dtype=starts.dtype, device=starts.device)
    rows = torch.searchsorted(starts[1:], elements, right=True).clamp_(max=len(starts) - 2)
    return Ragged(rows, (elements - starts[rows]).long())


def owners(rows: torch.Tensor, count: int) -> torch.Tensor:
    """The place in `rows` that holds each of the numbers below `count`, or −1 if none does: int64 [count].

    A negative row stands for no row. No other row may appear twice.
    """
    places = torch.arange(len(rows), device=rows.device)
    held = places.new_full((count + 1,), -1)
    held[rows.masked_fill(rows < 0, count)] = places
    return held[:count]


def overwrite(target: torch.Tensor, chosen: torch.Tensor, values: torch.Tensor) -> None:
    """Copy the values to the chosen elements of a tensor. The others stay as they are."""
    target.copy_(torch.where(chosen, values, target))
