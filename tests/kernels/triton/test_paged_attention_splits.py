"""How paged_attention splits keys between programs, in Triton's interpreter. test_triton.py runs this file in a process
of its own.

The samples of the contract are too small for loops over hundreds of requests and dozens of partial results, and too
small to fill a GPU. So the step sizes of these loops and the number of multiprocessors are small numbers here.
"""

import importlib
import itertools
import math
import random

import pytest
import torch
import triton.language as tl
from rare_keys import rare_keys_count

from vllm_opset import ops
from vllm_opset.kernel import kernels_of
from vllm_opset.kernels.triton import INTERPRETED
from vllm_opset.kernels.triton.paged_attention import _plan_sm90, combine, decode, prefill
from vllm_opset.kernels.triton.paged_attention._call import Call
from vllm_opset.ops.attention._paged_inputs import UNTOUCHED, PagedCase
from vllm_opset.ops.attention.paged_attention import TOLERANCES

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="test_triton.py runs it, with TRITON_INTERPRET=1")

ALONE = {"num_heads": 1, "num_kv_heads": 1}
CASES = {
    "decode": PagedCase(((1, 34), (0, 0), (1, 300), (1, 64), (1, 65)), num_heads=4, num_kv_heads=2),
    "decode, window, sinks": PagedCase(((1, 34), (1, 300), (1, 130)), window=100, sinks=True, **ALONE),
    "decode, many rows": PagedCase(((3, 34), (3, 300), (0, 0), (1, 5)), num_heads=10, num_kv_heads=2),
    # With two multiprocessors, two programs attend the third request.
    "several queries": PagedCase(((20, 300), (0, 0), (1, 300), (9, 200)), **ALONE),
    "many queries": PagedCase(((1, 20), (1, 300), (3, 9), (70, 700)), **ALONE),
    "many queries, window, sinks": PagedCase(((70, 700), (1, 300)), window=600, sinks=True, **ALONE),
}


@pytest.fixture
def in_small_steps(monkeypatch):
    for module in (decode, prefill):
        monkeypatch.setattr(module, "REQUESTS", tl.constexpr(2))
    monkeypatch.setattr(combine, "COMBINED_ELEMENTS", tl.constexpr(2 * 64))  # one partial result of 2 rows or more


@pytest.mark.parametrize("num_multiprocessors", [2, 12])
@pytest.mark.parametrize("name", CASES)
def test_attention_agrees_however_keys_are_split(name, num_multiprocessors, in_small_steps, monkeypatch):
    launcher = importlib.import_module("vllm_opset.kernels.triton.paged_attention")
    monkeypatch.setattr(launcher._launch, "multiprocessors", lambda device: num_multiprocessors)
    case, dtype = CASES[name], torch.float32
    (query, kv_cache, batch, out), options = case.make(name, "cpu", dtype)
    want = out.clone()
    ops.paged_attention(query, kv_cache, batch, want, **options)
    tolerance = TOLERANCES[dtype]
    for _ in range(2):  # the second layer of a step finds the memory that the first one left
        out.fill_(UNTOUCHED)
        kernels_of("paged_attention")["triton"].run(query, kv_cache, batch, out, **options)
        torch.testing.assert_close(out, want, rtol=tolerance.rtol, atol=tolerance.atol * case.output_scale())


@pytest.mark.parametrize("requests", [((1, 40), (1, 7)), ((20, 40), (1, 7))], ids=["decode", "prefill"])
@pytest.mark.parametrize("size", [2.0**40, 1.0, 2.0**-40])
def test_queries_of_any_size_attend_an_fp8_cache_in_fp16(size, requests):
    """fp16 ends at 2^16 and 2^-24. bf16 does not."""
    case = PagedCase(requests, cache_dtype=torch.float8_e4m3fn)
    (query, kv_cache, batch, out), options = case.make("fp8", "cpu", torch.bfloat16)
    options["scale"] /= size
    want = out.clone()
    ops.paged_attention(query * size, kv_cache, batch, want, **options)
    kernels_of("paged_attention")["triton"].run(query * size, kv_cache, batch, out, **options)
    tolerance = TOLERANCES[torch.bfloat16]
    torch.testing.assert_close(out, want, rtol=tolerance.rtol, atol=tolerance.atol * case.output_scale())


@pytest.mark.parametrize("num_queries", [1, 20])
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
def test_keys_of_tiny_probabilities_count_in_fp16(cache_dtype, num_queries):
    rare_keys_count(cache_dtype, num_queries, num_keys=300, device="cpu")


BLOCK_N, COMBINE_COST = 16, 0.125
REQUESTS = {
    "few": ((1, 5), (3, 40), (0, 0), (1, 100), (2, 0), (1, 16)),
    "long": ((1, 4000), (1, 7)),
    "more than are planned together": tuple((index % 7 != 3, 3 + index * 37 % 90) for index in range(600)),
}


@pytest.mark.parametrize("left", [None, 30])
@pytest.mark.parametrize(("switch_cost", "whole_cost"), [(0, 0), (2, 3), (2, -100)])
@pytest.mark.parametrize("num_programs", [1, 5, 150])
@pytest.mark.parametrize("name", REQUESTS)
def test_the_plan_cuts_the_row_of_all_blocks_into_equal_ranges(name, num_programs, switch_cost, whole_cost, left):
    requests = tuple((int(query_len), seq_len if query_len else 0) for query_len, seq_len in REQUESTS[name])
    batch = PagedCase(requests).batch(torch.zeros(len(requests), 1, dtype=torch.int32, device="cpu"))
    starts, ends = torch.full((2, len(requests) + 1), -1, dtype=torch.int32, device="cpu")
    ranges = torch.full((num_programs, decode.RANGE_FIELDS.value), -1, dtype=torch.int32, device="cpu")
    decode.plan[(1,)](
        batch.query_start_loc, batch.seq_lens, len(requests), starts, ends, ranges, num_programs, switch_cost,
        whole_cost, LEFT=left, BLOCK_N=BLOCK_N, COMBINE_COST=COMBINE_COST,
    )  # fmt: skip
    blocks = [_blocks(query_len, seq_len, left) for query_len, seq_len in requests]
    *ends, blocks_per_program = ends.tolist()
    quickest = int(math.sqrt(max(blocks) * COMBINE_COST) + 0.5)
    in_turn = max(1, math.ceil(sum(number + switch_cost for number in blocks if number) / num_programs), quickest)
    alone = (number for number in range(max(1, quickest), max(blocks) + 1) if _split(blocks, number) <= num_programs)
    whole = next((number for number in alone if number <= in_turn + whole_cost), None)
    assert blocks_per_program == (whole or in_turn)
    places = [number + switch_cost if number else 0 for number in blocks]
    if whole:
        places = [math.ceil(number / whole) * whole for number in blocks]
    assert starts.tolist() == [sum(places[:count]) for count in range(len(places) + 1)]
    assert ends == [start + number for start, number in zip(starts.tolist(), blocks, strict=False)]
    for program in range(num_programs):
        first, last = program * blocks_per_program, (program + 1) * blocks_per_program - 1
        request = min(sum(end <= first for end in starts[1:].tolist()), len(requests) - 1)
        last_request = min(sum(end <= last for end in starts[1:].tolist()), len(requests) - 1)
        facts = [starts[request].item(), ends[request], batch.query_start_loc[request].item(), *requests[request]]
        assert ranges[program].tolist() == [request, last_request - request + 1, *facts, blocks_per_program]
    if whole and max(blocks) > 0:
        assert all(ranges[: _split(blocks, whole), 1] == 1)


def _split(blocks: list[int], most: int) -> int:
    """The number of programs, if each attends at most so many blocks of one request."""
    return sum(math.ceil(number / most) for number in blocks)


def _blocks(query_len: int, seq_len: int, left: int | None) -> int:
    """The blocks of a request."""
    if query_len == 0:
        return 0
    first_seen = 0 if left is None else max(0, seq_len - query_len - left)
    return max(1, math.ceil(seq_len / BLOCK_N) - first_seen // BLOCK_N)


QUERIES, BOX_ROWS = 8, 4
TILES = {
    "few": REQUESTS["few"],
    "more than are planned together": REQUESTS["more than are planned together"][:90],
    "one long, others short": ((1, 5), (20, 3000), (0, 0), (9, 30), (1, 16), (2, 0)),
    "chunks": ((40, 700), (64, 64), (33, 900)),
}


@pytest.mark.parametrize(
    ("left", "right", "num_heads", "most_partials"),
    [(None, 0, 1, 40), (70, 0, 3, 9), (None, None, 2, 12), (20, 30, 2, 0), (None, 0, 3, 3)],
)
@pytest.mark.parametrize("name", TILES)
def test_the_plan_of_prefill_lists_each_split_of_each_tile_once(
    name, left, right, num_heads, most_partials, monkeypatch
):
    monkeypatch.setattr(_plan_sm90, "TILES", tl.constexpr(32))
    monkeypatch.setattr(_plan_sm90._launch, "multiprocessors", lambda device: 12)
    requests = tuple((int(query_len), seq_len if query_len else 0) for query_len, seq_len in TILES[name])
    batch = PagedCase(requests).batch(torch.zeros(len(requests), 1, dtype=torch.int32, device="cpu"))
    num_tiles = sum(query_len for query_len, _ in requests) // QUERIES + len(requests)
    values = {"programs": 2, "split_keys": 2 * BLOCK_N, "split_cost": 1, "combine_cost": 1}
    plan = _plan_sm90.make_plan(
        batch, num_tiles, QUERIES, num_heads, left, right, BOX_ROWS, BLOCK_N, most_partials, tuple(values.items())
    )
    split_blocks, num_items, num_split_tiles = plan.sizes.tolist()
    items, split_tiles = plan.items[:num_items].tolist(), plan.split_tiles[:num_split_tiles].tolist()
    tiles = {}
    for request, (query_len, seq_len) in enumerate(requests):
        for first in range(0, query_len, QUERIES):
            position, last = seq_len - query_len + first, seq_len - query_len + min(query_len, first + QUERIES) - 1
            low = 0 if left is None else max(0, position - left) // BOX_ROWS * BOX_ROWS
            high = seq_len if right is None else min(seq_len, last + right + 1)
            tiles[request, first] = max(1, math.ceil((high - low) / BLOCK_N))
    listed = sorted((request, first, split) for request, first, split, _ in items)
    splits = {tile: math.ceil(number / split_blocks) for tile, number in tiles.items()}
    assert listed == sorted((*tile, split) for tile, number in splits.items() for split in range(number))
    partials = {(request, first): (partial, number) for request, first, partial, number in split_tiles}
    assert {tile: number for tile, (_, number) in partials.items()} == {
        tile: number for tile, number in splits.items() if number > 1
    }
    stored = [partial + split for partial, number in partials.values() for split in range(number)]
    assert sorted(stored) == [*range(len(stored))] and len(stored) <= most_partials
    for request, first, split, partial in items:
        assert splits[request, first] == 1 or partial == partials[request, first][0] + split
    lengths = [min(split_blocks, tiles[request, first] - split * split_blocks) for request, first, split, _ in items]
    kinds = [next(kind for kind in (1, 2, 4) if kind == 4 or length * kind * 2 > split_blocks) for length in lengths]
    assert kinds == sorted(kinds), "an item comes after some that are less than half as long"


def test_the_plan_of_prefill_splits_a_tile_that_all_others_wait_for(monkeypatch):
    monkeypatch.setattr(_plan_sm90._launch, "multiprocessors", lambda device: 12)
    values = {"programs": 2, "split_keys": BLOCK_N, "split_cost": 1, "combine_cost": 1}

    def split_blocks(*requests: tuple[int, int]) -> int:
        batch = PagedCase(requests).batch(torch.zeros(len(requests), 1, dtype=torch.int32, device="cpu"))
        tiles = sum(query_len for query_len, _ in requests) // QUERIES + len(requests)
        key = tiles, QUERIES, 1, None, 0, BOX_ROWS, BLOCK_N, 24, tuple(values.items())
        return _plan_sm90.make_plan(batch, *key).sizes[0].item()

    longest = 100
    assert split_blocks((1, longest * BLOCK_N)) < longest // 4
    assert split_blocks((1, longest * BLOCK_N), *((8, 64),) * 20) < longest // 4
    assert split_blocks(*((1, longest * BLOCK_N),) * 12) == longest  # one tile for each program


def test_combining_takes_each_row_of_split_tiles():
    rows, columns, most_partials, group, num_kv_heads = 16, 16, 5, 2, 2
    rng = torch.Generator().manual_seed(0)
    partials = torch.randn(num_kv_heads, most_partials, rows, columns, generator=rng)
    stats = torch.randn(num_kv_heads, most_partials, rows, 2, generator=rng).abs()
    # Two split tiles: 6 queries of request 0 from the first one on, and 3 queries of request 2 from the ninth one on.
    split_tiles = torch.tensor([[0, 0, 0, 2], [2, 8, 2, 3]], dtype=torch.int32)
    starts = torch.tensor([0, 6, 7, 18], dtype=torch.int32)
    v_scale = torch.tensor(1.5)
    out = torch.full((18, num_kv_heads * group, columns), UNTOUCHED)
    want = out.clone()
    for (_, _, partial, number), first_token, num_queries in zip(split_tiles.tolist(), (0, 15), (6, 3), strict=True):
        parts = slice(partial, partial + number)
        weight = torch.exp2(stats[:, parts, :, :1] - stats[:, parts, :, :1].amax(1, keepdim=True))
        result = (partials[:, parts] * weight).sum(1) / (stats[:, parts, :, 1:] * weight).sum(1)
        for head, row in itertools.product(range(num_kv_heads), range(num_queries * group)):
            want[first_token + row // group, head * group + row % group] = result[head, row] * v_scale
    _plan_sm90.combine_prefill_sm90[(3,)](
        out, out.stride(), starts, None, v_scale, partials, stats, torch.tensor([1, 0, 2], dtype=torch.int32),
        split_tiles, most_partials, NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_SIZE=columns, ROWS=4, BLOCK_M=rows,
        BLOCK_D=columns, PDL=False,
    )  # fmt: skip
    torch.testing.assert_close(out, want)


def test_no_launch_combines_where_the_plan_splits_nothing(monkeypatch):
    """The host rules out splits by the sizes of a batch alone, and the plan agrees, whatever the lengths are."""
    monkeypatch.setattr(_plan_sm90._launch, "multiprocessors", lambda device: 12)
    values = {"programs": 2, "split_keys": BLOCK_N, "unsplit_keys": 0, "split_cost": 1, "combine_cost": 1}
    rng, ruled_out = random.Random(0), 0
    for _ in range(60):
        query_lens = [rng.randint(1, 300) for _ in range(rng.choice((1, 1, 2, 5)))]
        requests = tuple((length, length + rng.choice((0, 0, 40, 900))) for length in query_lens)
        case = PagedCase(requests, num_heads=8, num_kv_heads=4, window=rng.choice((None, 100)))
        (query, cache, batch, out), _ = case.make("splits", "cpu", torch.float32)
        left = None if case.window is None else case.window - 1
        call = Call(query, cache, batch, out, 1.0, left, 0, 0.0, None, None, None, None)
        if _plan_sm90.most_partials_of(call, values, QUERIES) == 0:
            num_tiles = sum(query_lens) // QUERIES + len(requests)
            key = num_tiles, QUERIES, 4, left, 0, BOX_ROWS, BLOCK_N, 6, tuple(values.items())
            assert _plan_sm90.make_plan(batch, *key).sizes[2] == 0
            ruled_out += 1
    assert 10 < ruled_out < 50
