"""paged_attention of many queries on a Hopper GPU, which has its own kernel for them: all problems that it takes.

The samples of the contract have too few queries for it.
"""

import functools
import importlib

import pytest
import torch
from rare_keys import rare_keys_count
from replays import assert_same_bits

from vllm_opset import ops
from vllm_opset.kernel import kernels_of
from vllm_opset.kernels.triton import _launch
from vllm_opset.ops.attention._paged_inputs import LAYOUTS, PagedCase
from vllm_opset.ops.attention.paged_attention import TOLERANCES

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs an NVIDIA GPU of the Hopper generation: runs on one")

# Prompts, chunks of prompts, decoded tokens and an empty request.
MIXED = ((1, 77), (150, 150), (70, 300), (0, 0), (1, 34), (200, 512), (40, 41), (3, 1000), *((1, 20),) * 12)
CROSS = ((300, 40), (6, 2), (100, 190), (2, 0), *((70, 7),) * 16)
mixed = functools.partial(PagedCase, MIXED, num_heads=16, num_kv_heads=4)
CASES = {
    "plain": mixed(),
    "MHA": mixed(num_kv_heads=16),
    "MQA": mixed(num_kv_heads=1),
    "GQA, 7 heads a group": mixed(num_heads=28),
    "GQA, 128 heads a group": mixed(num_heads=256, num_kv_heads=2),
    # The first queries of these chunks see all but the last key of a block of 64 or of 128.
    "chunks that begin one key before the end of a block": PagedCase(
        ((200, 262), (200, 326), (130, 256)) * 8, num_heads=16, num_kv_heads=4
    ),
    "shared pages": PagedCase(((90, 100), (3, 60), (80, 90)) * 8, num_heads=16, num_kv_heads=4, shared_pages=3),
    "far apart scores": mixed(query_std=20.0),
    "padded rows and requests, loose bounds": mixed(padded_rows=5, loose_bounds=True),
    **{f"window {window}": mixed(window=window) for window in (1, 20, 129, 500, (99, 0))},
    "soft cap": mixed(soft_cap=30.0),
    "soft cap, far apart scores": mixed(soft_cap=5.0, query_std=4.0),
    "soft cap, window": mixed(soft_cap=30.0, window=40),
    "sinks": mixed(sinks=True),
    "sinks, window": mixed(sinks=True, window=40),
    "non-causal": mixed(causal=False),
    **{
        f"non-causal, window {window}": mixed(causal=False, window=window)
        for window in ((5, 3), (-1, 3), (60, -1), (20, 150))
    },
    # As the tokens of Gemma-3's images attend.
    **{
        f"images, head size {size}": PagedCase(
            ((256, 600), (256, 1500), (30, 1200), (256, 256)),
            num_heads=16,
            num_kv_heads=4,
            head_size=size,
            causal=False,
            window=(1023, -1),
        )
        for size in (128, 256)
    },
    "few queries of many requests": PagedCase(((5, 300), (1, 77), (9, 120)) * 48, num_heads=16, num_kv_heads=4),
    "cross attention": PagedCase(CROSS, num_heads=16, num_kv_heads=4, causal=False),
    **{f"head size {size}": mixed(head_size=size) for size in (80, 120, 128, 192, 256)},
    **{f"block size {size}": mixed(block_size=size, window=90) for size in (32, 48, 64, 80, 128)},
    **{layout: mixed(head_size=128, layout=layout) for layout in LAYOUTS},
}
FP8 = {"cache_dtype": torch.float8_e4m3fn}
FP8_CASES = {
    "plain": mixed(**FP8),
    "GQA, 7 heads a group": mixed(num_heads=28, **FP8),
    "far apart scores": mixed(query_std=20.0, **FP8),
    "window 129": mixed(window=129, **FP8),
    "soft cap": mixed(soft_cap=30.0, **FP8),
    "sinks": mixed(sinks=True, **FP8),
    "non-causal": mixed(causal=False, **FP8),
    **{layout: mixed(head_size=128, layout=layout, **FP8) for layout in LAYOUTS},
    "padded rows and requests, loose bounds": mixed(head_size=128, padded_rows=5, loose_bounds=True, **FP8),
    **{f"head size {size}": mixed(head_size=size, **FP8) for size in (80, 128, 192, 256)},
    **{f"block size {size}": mixed(block_size=size, window=90, **FP8) for size in (32, 48, 128)},
}
MANY_TILES = {
    name: CASES[name] for name in ("plain", "window 129", "few queries of many requests", "cross attention")
} | {f"fp8 cache, {name}": FP8_CASES[name] for name in ("plain", "window 129", "head size 256")}
COSTS = {"programs": 4, "split_keys": 128, "split_cost": 0, "combine_cost": 0}
NO_SPLITS = {**COSTS, "unsplit_keys": 2**30}
RINGS = ({"keys": 128, "stages": 2, **NO_SPLITS}, {"keys": 64, "stages": 4, **NO_SPLITS})
# Tiles of one split and of several. Some have rows for the first warpgroup alone, and keys end within blocks.
FEW = ((100, 3000), (1, 300), (7, 900), (0, 0), (40, 41))
few = functools.partial(PagedCase, FEW, num_heads=16, num_kv_heads=4)
SPLIT = {
    "plain": few(),
    "window": few(window=900),
    "sinks": few(sinks=True),
    "soft cap": few(soft_cap=30.0),
    "non-causal": few(causal=False),
    "head size 256, block size 48": few(head_size=256, block_size=48),
    "fp8 cache": few(**FP8),
    "fp8 cache, sinks": few(sinks=True, **FP8),
    "fp8 cache, head size 256, block size 48": few(head_size=256, block_size=48, **FP8),
}


def hopper_agrees(case: PagedCase, dtype: torch.dtype, values: dict[str, int], size: float = 1.0) -> None:
    """size: queries are multiplied by it, and the scale is divided by it."""
    (query, kv_cache, batch, out), options = case.make("hopper", "cuda", dtype)
    inputs = (query * size, kv_cache, batch, out)
    options["scale"] /= size
    want = out.clone()
    ops.paged_attention(query * size, kv_cache, batch, want, **options)
    with _launch.trial("paged_attention_prefill_sm90", values) as asked:
        for _ in range(2):  # the second call finds the memory that the first one left
            kernels_of("paged_attention")["triton"].run(*inputs, **options, variant="prefill_sm90")
    assert asked, "the case went to another kernel"
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out, want, rtol=tolerance.rtol, atol=tolerance.atol * case.output_scale())


@pytest.mark.parametrize("values", RINGS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_hopper_agrees(name, values):
    hopper_agrees(CASES[name], torch.bfloat16, values)


@pytest.mark.parametrize("name", ["plain", "window 129", "sinks", "head size 256", "block size 48"])
def test_hopper_agrees_in_fp16(name):
    hopper_agrees(CASES[name], torch.float16, RINGS[0])


@pytest.mark.parametrize("values", RINGS, ids=str)
@pytest.mark.parametrize("name", FP8_CASES)
def test_hopper_takes_an_fp8_cache(name, values):
    hopper_agrees(FP8_CASES[name], torch.bfloat16, values)


def test_queries_in_fp16_with_an_fp8_cache_go_to_another_kernel():
    (query, kv_cache, batch, out), options = FP8_CASES["plain"].make("hopper", "cuda", torch.float16)
    with _launch.trial("paged_attention_prefill_sm90", RINGS[0]) as asked:
        kernels_of("paged_attention")["triton"].run(query, kv_cache, batch, out, **options)
    assert not asked


@pytest.mark.parametrize("size", [2.0**-40, 2.0**40])
def test_hopper_takes_an_fp8_cache_for_queries_of_any_size(size):
    """e4m3 has neither size: each row of queries becomes e4m3 with a power of two of its own."""
    hopper_agrees(FP8_CASES["head size 128"], torch.bfloat16, RINGS[0], size)


@pytest.mark.parametrize("values", RINGS, ids=str)
def test_rows_of_zeros_average_the_values_whatever_the_scale_of_keys(values):
    (query, kv_cache, batch, out), options = FP8_CASES["plain"].make("zeros", "cuda", torch.bfloat16)
    options["k_scale"] = torch.tensor(2.0**-40, device="cuda")
    query.zero_()
    want = out.clone()
    ops.paged_attention(query, kv_cache, batch, want, **options)
    with _launch.trial("paged_attention_prefill_sm90", values):
        kernels_of("paged_attention")["triton"].run(query, kv_cache, batch, out, **options, variant="prefill_sm90")
    tolerance = TOLERANCES[torch.bfloat16]
    torch.testing.assert_close(out, want, rtol=tolerance.rtol, atol=tolerance.atol)


@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
def test_keys_of_tiny_probabilities_count_in_fp16(cache_dtype):
    rare_keys_count(cache_dtype, num_queries=100, num_keys=3000, device="cuda", variant="prefill_sm90")


@pytest.mark.parametrize("ring", RINGS, ids=str)
@pytest.mark.parametrize("name", SPLIT)
def test_hopper_agrees_when_keys_are_split(name, ring):
    hopper_agrees(SPLIT[name], torch.bfloat16, ring | {"unsplit_keys": 0})


@pytest.mark.parametrize("num_programs", [1, 3])
@pytest.mark.parametrize("values", RINGS, ids=str)
@pytest.mark.parametrize("name", MANY_TILES)
def test_hopper_agrees_when_programs_take_many_tiles(name, values, num_programs, monkeypatch):
    launcher = importlib.import_module("vllm_opset.kernels.triton.paged_attention")
    monkeypatch.setattr(launcher._launch, "multiprocessors", lambda device: num_programs)
    hopper_agrees(MANY_TILES[name], torch.bfloat16, values)


def test_hopper_gives_the_same_again_and_again():
    """Programs draw their tiles in another order each time; the result of a tile must not depend on it."""
    case = PagedCase(((3000, 5000), (700, 700), (1, 4000)), num_heads=32, num_kv_heads=8, head_size=128)
    assert_same_bits(case, 20)
