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
from vllm_opset.kernels.triton._products.shared_tiles import even_run_of, most_pieces, run_of
from vllm_opset.ops.gemm._quantised import BLOCK
from vllm_opset.targets import Target, instead

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs an NVIDIA GPU of the Hopper generation: runs on one")
# piece_bytes: one that lets several programs share tiles, and one that lets none.
LAUNCHES = [
    {"rows": rows, "lines": lines, "stages": 3, "wide": wide, "programs": programs, "piece_bytes": piece_bytes}
    for (rows, lines, wide, programs), piece_bytes in itertools.product(
        ((64, 1, 0, 2), (64, 2, 0, 1), (128, 1, 0, 1), (128, 1, 1, 1), (128, 2, 1, 1), (256, 1, 1, 1)), (0, 1 << 20)
    )
]
# Outputs and columns end within tiles and lines, and there are more and fewer tiles than programs.
SHAPES = ((40, 144), (333, 400), (6144, 4096))
TOKENS = (1, 2, 9, 16, 31, 64)


@on_hopper
@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: "-".join(map(str, launch.values())))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_launch_multiplies(dtype, launch):
    rng = torch.Generator("cuda").manual_seed(1)
    for tokens, (outputs, columns) in itertools.product((*TOKENS, 128), SHAPES):
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
    for tokens, (outputs, columns) in itertools.product((*TOKENS, 100), SHAPES):
        arguments = fp8_arguments(tokens, outputs, columns, groups, rng)
        with _launch.trial(f"{'blocks' if groups[0] == BLOCK else 'rows'}_linear_decode_sm90", launch):
            got = kernels_of("linear")["triton"].run(*arguments, variant="decode_sm90")
        torch.testing.assert_close(got, ops.linear(*arguments), rtol=2**-6, atol=2**-5)


def _picked(tokens: int, dtype=torch.bfloat16, columns=256, wanted: str | None = "decode_sm90") -> str:
    return linear.VARIANTS.of(wanted, torch.zeros(tokens, columns, dtype=dtype), torch.zeros(384, columns, dtype=dtype))


def test_it_takes_few_tokens_that_the_copy_engine_can_read():
    assert {_picked(tokens) for tokens in (1, 2, 64, 128)} == {"decode_sm90"}
    assert _picked(8, torch.float16) == "decode_sm90"
    assert _picked(129) == _picked(8, torch.float32) == _picked(8, columns=77) == "torch"
    with instead(Target("nvidia", "sm80")):
        assert _picked(8) == "torch"


def test_it_is_taken_for_few_tokens():
    picked = [_picked(tokens, wanted=None) for tokens in (1, 2, 64, 65)]
    assert picked == ["one_row", "decode_sm90", "decode_sm90", "torch"]


@pytest.mark.parametrize("piece_units", [0, 2, 100])
def test_programs_take_all_units(piece_units):
    for tiles, tile_units, programs in itertools.product((1, 3, 64, 96, 384, 2374), (1, 7, 64, 192), (132, 264)):
        run = run_of(tiles, tile_units, programs, piece_units)
        units = [set(range(first, min(first + run, tiles * tile_units))) for first in range(0, tiles * tile_units, run)]
        assert len(units) <= programs and sum(map(len, units)) == tiles * tile_units
        starts = range(0, min(tiles, 50) * tile_units, tile_units)
        shared = max((start + tile_units - 1) // run - start // run + 1 for start in starts)
        assert shared <= most_pieces(tile_units, run)


@pytest.mark.parametrize("piece_units", [0, 2, 100])
def test_programs_that_share_a_tile_take_equally_many_units(piece_units):
    for tiles, tile_units, programs in itertools.product((1, 3, 64, 96, 384), (1, 7, 32, 96), (132, 264)):
        run = even_run_of(tiles, tile_units, programs, piece_units)
        sharing = -(-tile_units // run)
        assert run * (sharing - 1) < tile_units
        assert sharing == 1 or sharing * tiles <= programs


def test_programs_share_tiles_if_that_takes_less_time():
    assert even_run_of(64, 32, 132, piece_units=4) == 16
    assert even_run_of(64, 32, 132, piece_units=16) == 32, "the sum takes as long"
    assert even_run_of(67, 32, 132, piece_units=0) == 32, "there are not two programs for each tile"
