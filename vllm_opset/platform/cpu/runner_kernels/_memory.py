"""Tensors and index arithmetic that several kernels share. Small operations in NumPy cost a tenth of PyTorch's."""

import ctypes
import functools
import math

import numpy as np
import torch


@functools.lru_cache(maxsize=1024)
def int32_at(address: int, *shape: int) -> np.ndarray:
    """The int32 array of this shape at an address. Whoever calls keeps the memory alive.

    It is made once for an address and a shape, because it owns no memory, and a step needs the same ones as the last.
    """
    count = math.prod(shape)
    return np.frombuffer((ctypes.c_int32 * count).from_address(address), dtype=np.int32).reshape(shape)


def differences(starts: torch.Tensor) -> np.ndarray:
    """The lengths of rows that begin at these places, with the end of the last row. `np.diff` costs four times more."""
    values = starts.numpy()
    return values[1:] - values[:-1]


def ragged(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The row of each element of rows with these lengths, and its place in its row: two arrays [lengths.sum()]."""
    rows = np.arange(len(lengths))
    if (lengths == 1).all():  # as in a step that only decodes
        return rows, np.zeros_like(rows)
    rows = rows.repeat(lengths)
    starts = lengths.cumsum() - lengths
    return rows, np.arange(len(rows)) - starts[rows]


def bits(words: np.ndarray, count: int) -> np.ndarray:
    """The first `count` bits of each row of int32 words, the lowest bit first: uint8 [rows, count] of 0 and 1."""
    return np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, count=count, bitorder="little")


def recent_tokens(
    row: int,
    request: int,
    all_token_ids: torch.Tensor,
    total_len: torch.Tensor,
    input_ids: torch.Tensor,
    expanded_local_pos: torch.Tensor,
) -> list[int]:
    """The tokens before a row of the logits: those of the request, and the drafts before this row.

    input_ids: the input of each row of the logits. A request's first row has its last token, the next ones its drafts.
    """
    place = int(expanded_local_pos[row])
    drafts = input_ids[row - place + 1 : row + 1].tolist()
    return all_token_ids[request, : int(total_len[request])].tolist() + drafts
