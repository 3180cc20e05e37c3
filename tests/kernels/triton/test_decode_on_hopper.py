"""Products of few tokens on a Hopper GPU by `decode_sm90`: all of its tiles, and how its programs share the work.

Two things are tested without a GPU: which calls it takes, and how much of them each program does.
"""

import itertools

import pytest
import torch
from fp8_products import GROUPS, fp8_arguments

from vllm_opset import ops
from vllm_opset.kernel import kernels_of
from vllm_opset.kernels.triton import _launch, linear
from vllm_opset.kernels.triton._products.scaled_calls_sm90 import Operands
from vllm_opset.kernels.triton._products.shared_tiles import Costs, fastest_run, most_pieces
from vllm_opset.kernels.triton.linear import decode_sm90
from vllm_opset.ops.gemm._quantised import BLOCK, TOKEN_BLOCK
from vllm_opset.ops.schemes import FP8
from vllm_opset.targets import Target, instead

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs an NVIDIA GPU of the Hopper generation: runs on one")
NO_COSTS = dict.fromkeys(Costs._fields, 0)
TILES = ((64, 1, 0, 2), (64, 2, 0, 1), (128, 1, 0, 1), (128, 1, 1, 1), (128, 2, 1, 1), (256, 1, 1, 1))
# Programs share tiles wherever they can, and tokens have several small tiles. Or neither does.
LAUNCHES = [
    {"rows": rows, "lines": lines, "stages": 3, "wide": wide, "programs": programs, "several_from": several_from}
    | (NO_COSTS | {"share": share})
    for (rows, lines, wide, programs), (share, several_from) in itertools.product(TILES, ((0, 0), (1, 1000)))
]
# Outputs and columns end within tiles and lines, and there are more and fewer tiles than programs.
SHAPES = ((40, 144), (333, 400), (6144, 4096))
TOKENS = (1, 2, 9, 16, 31, 64, 200)  # of which the last have several tiles in any case


@on_hopper
@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: "-".join(map(str, launch.values())))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_launch_multiplies(dtype, launch):
    rng = torch.Generator("cuda").manual_seed(1)
    for tokens, (outputs, columns) in itertools.product(TOKENS, SHAPES):
        x = torch.randn(tokens, columns + 64, generator=rng, device="cuda").to(dtype)[:, 16 : columns + 16]
        weight = (torch.randn(outputs, columns, generator=rng, device="cuda") * columns**-0.5).to(dtype)
        bias = torch.randn(outputs, generator=rng, device="cuda").to(dtype)
        with _launch.trial("linear_decode_sm90", launch):
            got = [kernels_of("linear")["triton"].run(x, weight, bias, variant="decode_sm90") for _ in range(3)]
        wanted = ops.linear(x.double(), weight.double(), bias.double()).to(dtype)
        torch.testing.assert_close(got[0], wanted, rtol=2**-7, atol=2**-8)
        assert all(torch.equal(got[0], other) for other in got), "the order of the sums differs"


@on_hopper
@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: "-".join(map(str, launch.values())))
@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_every_launch_multiplies_fp8(groups, launch):
    rng = torch.Generator("cuda").manual_seed(1)
    for tokens, (outputs, columns) in itertools.product(TOKENS, SHAPES):
        arguments = fp8_arguments(tokens, outputs, columns, groups, rng)
        with _launch.trial(f"{'blocks' if groups[0] == BLOCK else 'rows'}_linear_decode_sm90", launch):
            got = kernels_of("linear")["triton"].run(*arguments, variant="decode_sm90")
        torch.testing.assert_close(got, ops.linear(*arguments), rtol=2**-6, atol=2**-5)


def _picked(tokens: int, dtype=torch.bfloat16, columns=256, wanted: str | None = "decode_sm90") -> str:
    return linear.VARIANTS.of(wanted, torch.zeros(tokens, columns, dtype=dtype), torch.zeros(384, columns, dtype=dtype))


def test_it_takes_tokens_that_the_copy_engine_can_read():
    assert {_picked(tokens) for tokens in (1, 2, 64, 300)} == {"decode_sm90"}
    assert _picked(8, torch.float16) == "decode_sm90"
    assert _picked(8, torch.float32) == _picked(8, columns=77) == "torch"
    with instead(Target("nvidia", "sm80")):
        assert _picked(8) == "torch"


def test_it_is_taken_for_few_tokens():
    picked = [_picked(tokens, wanted=None) for tokens in (1, 2, 64, 65)]
    assert picked == ["one_row", "decode_sm90", "decode_sm90", "torch"]


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(_launch, "multiprocessors", lambda device: 132)
    with instead(Target("nvidia", "sm90")):
        yield


def _launch_for(tokens: int, outputs: int, columns: int, groups) -> decode_sm90.Launch | None:
    """The launch of a product in fp8 without a request for this kernel, or None if another kernel serves it."""
    x, weight = (torch.empty(rows, columns, dtype=FP8) for rows in (tokens, outputs))
    scale, x_scale = (torch.empty(g.scale_shape(t.shape)) for g, t in zip(groups, (weight, x), strict=True))
    call = Operands(x, weight, scale, x_scale, torch.bfloat16)
    return decode_sm90.launch_of(call) if decode_sm90.suits(call) else None


@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_more_tokens_of_fp8_are_taken_for_few_outputs(h200, groups):
    few, many = (_launch_for(200, outputs, 2048, groups) for outputs in (768, 24576))
    assert few.tokens < 200 and few.at_once and many is None
    assert _launch_for(200, 4096, 12288, groups) is None, "it would take too long"
    assert _launch_for(513, 768, 2048, groups) is None


def test_tuning_gets_the_tokens_of_the_tile_that_holds_all(h200):
    launch = "blocks_linear_decode_sm90"
    with _launch.trial(launch, _launch.candidates(launch)[0]) as sizes:
        tiles = [_launch_for(tokens, 4096, 2048, (BLOCK, TOKEN_BLOCK)).tokens for tokens in (8, 64)]
    assert tiles == [8, 64] and (sizes[0], sizes[1]) == (8, 64)


def test_tokens_have_several_small_tiles_where_all_run_at_once(h200):
    tiles = [_launch_for(64, outputs, 2048, (BLOCK, TOKEN_BLOCK)).tokens for outputs in (768, 4096, 24576)]
    assert tiles == [16, 32, 64]


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize(("outputs", "columns"), [(512, 6144), (2048, 4096), (5120, 2048), (6144, 4096)])
def test_the_warm_up_reaches_all_kernels(h200, groups, outputs, columns):
    """Triton compiles anew for each tile, and where there is only one tile of tokens."""

    def kernels(sizes) -> set[tuple[int, bool]]:
        found = {tokens: _launch_for(tokens, outputs, columns, groups) for tokens in sizes}
        return {(launch.tokens, tokens <= launch.tokens) for tokens, launch in found.items() if launch is not None}

    assert kernels(range(1, 600, 7)) <= kernels(_launch.warm_sizes(torch.device("cpu"), 600))


COSTS = [Costs(*NO_COSTS.values()), Costs(1000, 500, 1000, 200, 1500), Costs(0, 1, 1000, 1000, 1000)]


@pytest.mark.parametrize("costs", COSTS)
def test_programs_take_all_units(costs):
    for tiles, tile_units, programs in itertools.product((1, 3, 64, 96, 384, 2374), (1, 7, 64, 192), (132, 264)):
        _, run = fastest_run(tiles, tile_units, programs, costs)
        units = [set(range(first, min(first + run, tiles * tile_units))) for first in range(0, tiles * tile_units, run)]
        assert len(units) <= programs and sum(map(len, units)) == tiles * tile_units
        starts = range(0, min(tiles, 50) * tile_units, tile_units)
        shared = max((start + tile_units - 1) // run - start // run + 1 for start in starts)
        assert shared <= most_pieces(tile_units, run)


@pytest.mark.parametrize(
    ("costs", "run"),
    [
        (Costs(start=0, unit=1, share=0, piece=0, crossing=0), 5),
        (Costs(start=0, unit=1, share=0, piece=0, crossing=4), 8),
        (Costs(start=0, unit=1, share=5, piece=4, crossing=4), 16),
    ],
    ids=["all programs", "no program has parts of two tiles", "no tile is shared"],
)
def test_a_run_is_as_long_as_its_costs_make_fastest(costs, run):
    """There are 40 tiles of 16 units. Each of 132 programs takes at least five of these 640 units."""
    assert fastest_run(40, 16, 132, costs)[1] == run
