"""top_k_top_p_sample on a CPU: filter by value, pack the survivors, and sample one.

The contract's filters sort token ids along with the logits. This kernel finds the cut-offs from the values alone: the
k-th largest by selection, the cut-off of top-p by a sort. It computes noise only for the survivors. In a large
vocabulary, top-k reads each logit once: it searches only the groups of neighbours with the largest maxima.

NumPy does most of the work. Its selection and sort are vectorised, and its operators cost a fraction of PyTorch's on
small arrays.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.ops.sampling import philox
from vllm_opset.ops.sampling.top_k_top_p_sample import GREEDY_BELOW, check_processed

# Survivors are packed if this saves at least so many random words. A packed token costs a whole block of words.
WORTH_PACKING = 4096
# From this many tokens on, rows with few survivors are drawn separately from rows with many.
LARGE_VOCABULARY = 4096
# The number of neighbours in a group; top-k first looks at the maximum of each group. A large vocabulary is nearly
# always a multiple of it.
GROUP = 64
# The sizes of temporaries that stay in the cache: logits of some rows, and blocks of random words.
LOGITS_AT_A_TIME, BLOCKS_AT_A_TIME = 2**18, 2**13


class Rows(NamedTuple):
    """The arguments of the op, with x = logits / scale. None means that a setting is off in every row."""

    logits: np.ndarray
    keys: np.ndarray
    scale: np.ndarray | None
    greedy: np.ndarray | None
    top_k: np.ndarray | None
    top_p: np.ndarray | None
    min_p: np.ndarray | None

    def at(self, index: np.ndarray) -> "Rows":
        if len(index) == len(self.keys):
            return self
        return Rows(*(None if values is None else values[index] for values in self))


class Survivors(NamedTuple):
    """x [B, C] of the kept tokens, −inf for dropped tokens among them, and their ids in rising order.

    ids: None if all V tokens are present.
    """

    x: np.ndarray
    ids: np.ndarray | None


# The ignored errors are log(0) = −inf, which is right for a min-p that is off, and rows without a finite logit, which
# are an error of the caller.
@kernel(ops.top_k_top_p_sample, name="cpu")
@np.errstate(divide="ignore", invalid="ignore")
def top_k_top_p_sample(
    logits: torch.Tensor,
    keys: torch.Tensor | None,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    processed: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    check_processed(processed, keys)
    if keys is None:
        return torch.from_numpy(logits.numpy().argmax(axis=1)), None
    arrays = (None if values is None else values.numpy() for values in (temperature, top_k, top_p, min_p))
    temperature, top_k, top_p, min_p = arrays
    rows = Rows(logits.numpy(), keys.numpy(), None, None, top_k, top_p, min_p)
    if temperature is not None:
        greedy = temperature < GREEDY_BELOW
        if processed is None and greedy.all():
            return torch.from_numpy(rows.logits.argmax(axis=1)), None
        rows = rows._replace(scale=np.where(greedy, np.float32(1), temperature), greedy=greedy)
    tokens, x = np.empty_like(rows.keys), None if processed is None else np.empty(rows.logits.shape, np.float32)
    for part, find in _parts(rows):
        some = rows.at(part)
        survivors = _filtered(some, find(some))
        tokens[part] = _exponential_argmax(some, survivors)
        if x is not None:
            x[part] = _unpacked(survivors, x.shape[1])
    if x is not None:
        x = torch.from_numpy(x)
    return torch.from_numpy(tokens), x.log_softmax(dim=1) if processed == "logprobs" else x


def _parts(rows: Rows) -> Iterator[tuple[np.ndarray, Callable[[Rows], Survivors]]]:
    """The rows to draw together, and for each such part the function that finds its candidates.

    A part is as wide as its row with the most survivors. Steps that read all logits several times take a few rows at a
    time.
    """
    num_rows, vocab_size = rows.logits.shape
    kinds = [np.arange(num_rows)]
    if vocab_size >= LARGE_VOCABULARY:
        limited, filtered = np.zeros((2, num_rows), bool)
        if rows.top_k is not None and vocab_size % GROUP == 0:
            limited = rows.top_k <= vocab_size // GROUP // 4
        for values, off in ((rows.top_k, vocab_size), (rows.top_p, 1), (rows.min_p, 0)):
            if values is not None:
                filtered |= values != off
        if limited.any():
            yield np.flatnonzero(limited), _of_large_groups
        kinds = [np.flatnonzero(filtered & ~limited), np.flatnonzero(~filtered)]
    at_a_time = max(1, LOGITS_AT_A_TIME // vocab_size)
    for kind in kinds:
        for first in range(0, len(kind), at_a_time):
            yield kind[first : first + at_a_time], _all


def _all(rows: Rows) -> Survivors:
    return Survivors(rows.logits if rows.scale is None else rows.logits / rows.scale[:, None], None)


def _of_large_groups(rows: Rows) -> Survivors:
    """The tokens that reach the k-th largest group maximum. They include all that top-k keeps, and lie in k groups."""
    num_rows, vocab_size = rows.logits.shape
    grouped = rows.logits.reshape(num_rows, vocab_size // GROUP, GROUP)
    largest = torch.from_numpy(grouped).amax(dim=2).numpy()
    # The floor is lowered a little, because the division by the temperature may round different logits to the same x.
    floor = _kth_largest(largest, rows.top_k)
    floor = (floor - 1e-6 * np.abs(floor))[:, None]
    row, group = np.divmod(np.flatnonzero(largest >= floor), largest.shape[1])
    values = grouped[row, group]
    place, offset = np.divmod(np.flatnonzero(values >= floor[row]), GROUP)
    row, values, ids = row[place], values[place, offset], group[place] * GROUP + offset
    return _side_by_side(num_rows, row, values if rows.scale is None else values / rows.scale[row], ids)


def _filtered(rows: Rows, survivors: Survivors) -> Survivors:
    if rows.top_k is not None or rows.min_p is not None:
        survivors = _pack(survivors, survivors.x >= _floor(rows, survivors.x)[:, None])
    if rows.top_p is not None:
        survivors = _pack(survivors, _nucleus(survivors.x, rows.top_p))
    return survivors


def _floor(rows: Rows, x: np.ndarray) -> np.ndarray:
    """The lowest x [B] that min-p and top-k keep."""
    floor = np.full(len(x), -np.inf, np.float32)
    if rows.min_p is not None:
        floor = x.max(axis=1) + np.log(rows.min_p)
    if rows.top_k is not None:
        limited = rows.top_k < x.shape[1]
        kth = _kth_largest(x, np.where(limited, rows.top_k, 1))
        floor = np.where(limited, np.maximum(floor, kth), floor)
    return floor


def _kth_largest(x: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The k-th largest value of each row of x [B, n], with k [B] <= n."""
    most, width = int(k.max()), x.shape[1]
    largest = np.sort(np.partition(x, width - most, axis=1)[:, width - most :], axis=1)
    return largest[np.arange(len(x)), most - k]


def _nucleus(x: np.ndarray, top_p: np.ndarray) -> np.ndarray:
    """A mask of the x [B, C] that top_p [B] keeps: all above the cut-off, and the first few of those that equal it."""
    ordered = np.sort(x, axis=1)
    # PyTorch accumulates in fp64.
    mass = torch.from_numpy(np.exp(ordered - ordered[:, -1:])).cumsum(dim=1).numpy()
    dropped = (mass <= ((1 - top_p) * mass[:, -1])[:, None]).sum(axis=1)
    dropped = np.where(top_p < 1, np.minimum(dropped, x.shape[1] - 1), 0)
    cut = ordered[np.arange(len(x)), dropped][:, None]
    equals_dropped = dropped - (ordered < cut).sum(axis=1)
    if not equals_dropped.any():
        return x >= cut
    equal = x == cut
    equals_kept = equal.sum(axis=1) - equals_dropped
    return (x > cut) | (equal & (equal.cumsum(axis=1) <= equals_kept[:, None]))


def _pack(survivors: Survivors, keep: np.ndarray) -> Survivors:
    """The survivors that `keep` [B, C] selects. If they are few, they are packed."""
    num_rows, width = keep.shape
    most = np.count_nonzero(keep, axis=1).max()
    if num_rows * (width - philox.WORDS * most) < WORTH_PACKING:
        return survivors._replace(x=np.where(keep, survivors.x, np.float32(-np.inf)))
    flat = np.flatnonzero(keep)
    row, place = np.divmod(flat, width)
    return _side_by_side(
        num_rows, row, survivors.x[row, place], place if survivors.ids is None else survivors.ids[row, place]
    )


def _side_by_side(num_rows: int, row: np.ndarray, x: np.ndarray, ids: np.ndarray) -> Survivors:
    """Packed survivors from a list in order of rows and ids. An invalid row without survivors gets token 0."""
    counts = np.bincount(row, minlength=num_rows)
    place = np.arange(len(row)) - (counts.cumsum() - counts)[row]
    width = max(1, counts.max())
    survivors = Survivors(np.full((num_rows, width), -np.inf, np.float32), np.zeros((num_rows, width), np.int64))
    survivors.x[row, place], survivors.ids[row, place] = x, ids
    return survivors


def _exponential_argmax(rows: Rows, survivors: Survivors) -> np.ndarray:
    """The token [B] with the largest weight / exponential noise in each row."""
    x, ids = survivors
    words = _all_words(rows.keys, x.shape[1]) if ids is None else _words_at(rows.keys, ids)
    score = np.exp(x - x.max(axis=1, keepdims=True))
    score /= philox.exponential(torch.from_numpy(words), torch.float32).numpy()
    if rows.greedy is not None:
        score = np.where(rows.greedy[:, None], x, score)
    best = score.argmax(axis=1)
    return best if ids is None else ids[np.arange(len(ids)), best]


def _unpacked(survivors: Survivors, vocab_size: int) -> np.ndarray:
    if survivors.ids is None:
        return survivors.x
    x = np.full((len(survivors.x), vocab_size), -np.inf, np.float32)
    # Rows with fewer survivors are padded with token 0 at −inf, so the maximum is the value of token 0.
    np.maximum.at(x, (np.arange(len(x))[:, None], survivors.ids), survivors.x)
    return x


def _words_at(keys: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The random words [B, C] of the tokens ids [B, C]."""
    return np.choose(ids % philox.WORDS, philox.block(ids // philox.WORDS, 0, 0, 0, *_halves(keys)))


def _all_words(keys: np.ndarray, count: int) -> np.ndarray:
    """The first `count` random words of each key's stream: [B, count], rounded to fp32."""
    num_blocks = -(-count // philox.WORDS)
    words = np.empty((len(keys), num_blocks, philox.WORDS), np.float32)
    rows_at_a_time = max(1, BLOCKS_AT_A_TIME // num_blocks)
    for row in range(0, len(keys), rows_at_a_time):
        halves = _halves(keys[row : row + rows_at_a_time])
        for first in range(0, num_blocks, BLOCKS_AT_A_TIME):
            counters = np.arange(first, min(first + BLOCKS_AT_A_TIME, num_blocks))
            for lane, some in enumerate(philox.block(counters, 0, 0, 0, *halves)):
                words[row : row + rows_at_a_time, first : first + BLOCKS_AT_A_TIME, lane] = some
    return words.reshape(len(keys), -1)[:, :count]


def _halves(keys: np.ndarray) -> tuple:
    """The 32-bit halves of keys, [B, 1]. A single key gives integers, which Python combines faster than NumPy."""
    key = int(keys[0]) if len(keys) == 1 else keys[:, None]
    return key & philox.MASK, key >> 32 & philox.MASK
