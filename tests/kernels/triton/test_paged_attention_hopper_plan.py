"""The arithmetic of paged_attention's Hopper kernel, on a CPU.

It decides which blocks of keys a tile attends, in which order and with which masks, and which queries form a tile. How
tiles are split is tested with the other kernels' splits, in test_paged_attention_splits.py.

Triton's interpreter does not run Gluon. So the bodies of these functions run as plain Python, on numbers, and on
PyTorch's tensors in place of the device's blocks. test_triton.py compiles the kernel for sm_90a. The rest needs a GPU
and test_paged_attention_on_hopper.py: barriers between the warps, copies to shared memory, the products, and the order
in which programs draw their tiles.
"""

import itertools
from collections import Counter
from types import FunctionType, SimpleNamespace

import pytest
import torch

from vllm_opset.kernels.triton import _launch
from vllm_opset.kernels.triton.paged_attention import _load_sm90 as hopper
from vllm_opset.kernels.triton.paged_attention import _plan_sm90 as planned
from vllm_opset.kernels.triton.paged_attention import _tile as shared
from vllm_opset.kernels.triton.paged_attention import prefill as many
from vllm_opset.kernels.triton.paged_attention import prefill_sm90


class Memory:
    """The memory behind a pointer. An address in it is the pointer plus an offset, as in device code."""

    def __init__(self, values: list[int]) -> None:
        self.values = torch.tensor(values)

    def __add__(self, offset: torch.Tensor) -> tuple["Memory", torch.Tensor]:
        return self, offset


def load(place: tuple[Memory, torch.Tensor], mask: torch.Tensor, other: int) -> torch.Tensor:
    memory, offset = place
    return torch.where(mask, memory.values[offset.clamp(max=len(memory.values) - 1)], other)


# Names of Triton's language, and of Gluon's.
LANGUAGE = SimpleNamespace(
    cdiv=_launch.cdiv,
    maximum=max,
    minimum=min,
    where=lambda condition, one, other: one if condition else other,
    arange=lambda first, last, layout=None: torch.arange(first, last),
    load=load,
    sum=lambda values, axis=0: int(values.sum()),
    int32=torch.int32,
    BlockedLayout=lambda *_: None,
    num_warps=lambda: 1,
)


def as_python(function, **names):
    """The body of a device function, with other values for some of the names that it uses."""
    body = function.fn
    return FunctionType(body.__code__, {**body.__globals__, "tl": LANGUAGE, "gl": LANGUAGE, **names})


seen_by_all = as_python(shared.seen_by_all)
keys_of = as_python(planned.keys_of)
blocks = as_python(hopper.blocks, seen_by_all=seen_by_all, keys_of=keys_of)
start_of = as_python(hopper.start_of)
steps_of = as_python(hopper.steps_of)
queries_of = as_python(many.queries_of)

BLOCK_N, BOX_ROWS = 16, 4
SIDES = [*itertools.product((None, 0, 5, 15, 16, 40), (0,)), (None, None), (None, 3), (7, 3), (20, None), (5, 20)]


@pytest.mark.parametrize(("left", "right"), SIDES)
@pytest.mark.parametrize("num_queries", [1, 5, 16])
def test_a_tile_attends_each_block_once_and_masks_those_that_need_it(left, right, num_queries):
    for first_position, keys_after in itertools.product(range(66), (0, 1, 9, 30)):
        positions = range(first_position, first_position + num_queries)
        seq_len = positions[-1] + 1 + keys_after
        low, high, num_blocks, num_right, num_masked = blocks(
            first_position, num_queries, seq_len, BOX_ROWS, left, right, BLOCK_N
        )
        starts = [start_of(turn, low, num_blocks, num_right, BLOCK_N) for turn in range(num_blocks)]
        assert sorted(starts) == list(range(low, low + num_blocks * BLOCK_N, BLOCK_N)) and low % BOX_ROWS == 0
        seen = [set(_seen(position, seq_len, left, right)) for position in positions]
        union, everybodys = set.union(*seen), set.intersection(*seen)
        assert low <= min(union) and max(union) == high - 1 and starts[0] < high <= max(starts) + BLOCK_N
        assert 1 <= num_right <= num_masked <= num_blocks
        for turn, start in enumerate(starts):
            full = everybodys.issuperset(range(start, start + BLOCK_N))
            assert full or turn < num_masked, "a block that some query does not see is not masked"
            assert turn == 0 or start + BLOCK_N <= seq_len, "what lies beyond the last key is not in the first turn"


def _seen(position: int, seq_len: int, left: int | None, right: int | None) -> range:
    first = 0 if left is None else max(0, position - left)
    return range(first, seq_len if right is None else min(seq_len, position + right + 1))


@pytest.mark.parametrize("split_blocks", [1, 3, 4, 100])
def test_splits_of_a_tile_take_each_step_once(split_blocks):
    for num_blocks in range(1, 30):
        splits = range(_launch.cdiv(num_blocks, split_blocks))
        steps = [steps_of(split, split_blocks, num_blocks) for split in splits]
        assert [step for first, last in steps for step in range(first, last)] == [*range(num_blocks)]


def test_a_long_causal_tile_masks_two_blocks_at_most():
    for first_position in range(100, 200):
        *_, num_blocks, _, num_masked = blocks(first_position, 16, first_position + 16, BOX_ROWS, None, 0, BLOCK_N)
        assert num_masked <= 2 < num_blocks


REQUESTS = {
    "decode and prompts": [1, 1, 40, 0, 9, 1, 33, 8, 16, 1],
    "one prompt": [100],
    "none at all": [0, 0],
    "prompts behind many others": [1] * 30 + [50] + [2] * 7 + [21],
}


@pytest.mark.parametrize("name", REQUESTS)
def test_each_query_is_in_one_tile(name):
    queries, query_lens = 8, REQUESTS[name]
    starts = [sum(query_lens[:request]) for request in range(len(query_lens) + 1)]
    request_of = as_python(many._request_of, REQUESTS=4)
    found = Counter()
    for tile in range(starts[-1] // queries + len(query_lens)):
        request = request_of(tile, Memory(starts), len(query_lens), queries)
        first, number = queries_of(tile, starts[request], query_lens[request], len(query_lens), queries)
        assert number <= queries  # below one, the tile is empty
        found.update(range(starts[request] + first, starts[request] + first + number))
    assert found == Counter(range(starts[-1]))


PLACES = torch.zeros(4, 8, 72, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (PLACES, True),
        (PLACES[:, :, 8:64], True),
        (PLACES[:1].expand(4, 8, 72), True),  # a stride of zero
        (PLACES[:, :, 4:68], False),  # its address
        (PLACES.flatten()[: 4 * 68].view(4, 68), False),  # a stride
        (PLACES[:, :, ::2], False),  # the last stride
    ],
)
def test_the_copy_engine_takes_addresses_and_strides_of_16_bytes(tensor, expected):
    assert prefill_sm90.is_aligned(tensor) is expected
