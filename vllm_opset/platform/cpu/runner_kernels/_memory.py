"""Tensors and index arithmetic that several kernels share. Small operations in NumPy cost a tenth of PyTorch's."""

import ctypes

import numpy as np
import torch


def int32_at(address: int, *shape: int) -> np.ndarray:
    """The int32 array of this shape at an address. Whoever calls keeps the memory alive."""
    count = int(np.prod(shape))
    return np.frombuffer((ctypes.c_int32 * count).from_address(int(address)), dtype=np.int32).reshape(shape)


def ragged(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The row of each element of rows with these lengths, and its place in its row: two arrays [lengths.sum()]."""
    rows = np.arange(len(lengths)).repeat(lengths)
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
