"""Products of many tokens on a Hopper GPU, which has its own kernels for fp8, MXFP4 and int4 weights: all tiles.

Which calls they take is tested without a GPU.
"""

import math

import pytest
import torch
from fp8_products import GROUPS, fp8_arguments

from vllm_opset import ops
from vllm_opset.kernel import kernels_of
from vllm_opset.kernels.triton import _launch, fused_experts, grouped_gemm, linear
from vllm_opset.kernels.triton._products import scaled_calls_sm90
from vllm_opset.kernels.triton.grouped_gemm import mxfp4_sm90, packed_sm90
from vllm_opset.ops.gemm._quantised import BLOCK, TOKEN_BLOCK, quantised_normal
from vllm_opset.ops.schemes import FP8, INT8, PER_ROW, GroupShape, stored_mxfp4
from vllm_opset.targets import Target, instead

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs an NVIDIA GPU of the Hopper generation: runs on one")
TILES = [
    {"rows": rows, "outputs": outputs, "group": 8, "stages": 3} for rows, outputs in ((64, 256), (128, 128), (128, 256))
]
# As many programs as possible share tiles, or none do.
SHARED, WHOLE_TILES = {"share": 0, "piece": 0}, {"share": math.inf, "piece": 0}
COSTS = {"start": 0, "tile": 0, "unit": 1, "shared_unit": 1}
LINEAR_TILES = [
    (tile, {"box": box, "group": 8, "stages": stages} | COSTS | sharing)
    for tile, box, stages, sharing in (
        ((128, 128), 128, 5, SHARED), ((128, 128), 16, 3, WHOLE_TILES), ((64, 256), 64, 4, SHARED),
        ((64, 256), 16, 3, WHOLE_TILES), ((128, 256), 16, 3, WHOLE_TILES), ((128, 256), 128, 4, WHOLE_TILES),
    )
]  # fmt: skip
PACKED_TILES = [{"rows": rows, "group": 8, "stages": 4} for rows in (64, 128, 256)]
DECODE_TILES = [
    {"rows": 128, "warps": 8, "stages": 5, "programs": 2},
    {"rows": 64, "warps": 4, "stages": 2, "programs": 4},
]
WIDE_DECODE_TILES = [{"rows": 128, "stages": 5, "programs": 2}, {"rows": 256, "stages": 3, "programs": 1}]
INT4_TILES = [
    {"tokens": 16, "box": 128, "warpgroups": 4, "parts": 1, "stages": 8, "programs": 132, "registers": 104},
    {"tokens": 64, "box": 16, "warpgroups": 4, "parts": 1, "stages": 6, "programs": 132, "registers": 104},
    {"tokens": 64, "box": 128, "warpgroups": 2, "parts": 1, "stages": 6, "programs": 100, "registers": 232},
    {"tokens": 128, "box": 16, "warpgroups": 2, "parts": 2, "stages": 4, "programs": 132, "registers": 232},
]
# Tensor cores keep 14 bits of the sums of fp8. By blocks, they do so for 128 columns.
NEAR = {"rtol": 2**-6, "atol": 2**-5}


def _experts(scheme: str, inputs: int, outputs: int, device: str) -> dict[str, torch.Tensor]:
    """Five experts' weights, and the rows of 300 tokens; the scales of both."""
    rng = torch.Generator(device).manual_seed(7)
    x = torch.randn(300, inputs, generator=rng, device=device)
    weight = torch.randn(5, outputs, inputs, generator=rng, device=device) * inputs**-0.5
    if scheme == "mxfp4":
        weight, scale = stored_mxfp4(weight)
        scale = fused_experts.w1_scale_by_columns(scale, w1=weight)
        return {"x": x.bfloat16(), "weight": weight, "weight_scale": scale}
    if scheme.startswith("int4"):
        weight = torch.randint(256, (5, outputs, inputs // 2), generator=rng, device=device, dtype=torch.uint8)
        groups = (5, outputs, -(-inputs // (32 if "32" in scheme else 128)))
        scale = (torch.randn(groups, generator=rng, device=device) * inputs**-0.5 / 4).bfloat16()
        how = {"x": x.bfloat16(), "weight": weight, "weight_scale": scale}
        if "zero points" in scheme:
            how["weight_zero_point"] = torch.randint(16, groups, generator=rng, device=device, dtype=torch.uint8)
        return how
    group, x_group = (BLOCK, TOKEN_BLOCK) if scheme == "blocks" else (PER_ROW, PER_ROW)
    x, x_scale = quantised_normal((300, inputs), x_group, device, rng)
    stored = [quantised_normal((outputs, inputs), group, device, rng, inputs**-0.5) for _ in range(5)]
    weight, scale = (torch.stack(parts) for parts in zip(*stored, strict=True))
    return {"x": x, "weight": weight, "weight_scale": scale, "x_scale": x_scale}


@pytest.fixture
def nan_in_fresh_memory(monkeypatch):
    """Results that a kernel does not write are NaN, and never those of a call before."""
    new_empty = torch.Tensor.new_empty

    def filled(tensor: torch.Tensor, *args, **how) -> torch.Tensor:
        found = new_empty(tensor, *args, **how)
        return found.fill_(float("nan")) if found.dtype.is_floating_point else found

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)


@on_hopper
@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize(("tile", "launch"), LINEAR_TILES, ids=str)
@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_linear_by_every_tile(groups, tile, launch):
    """Rows, outputs and columns end within tiles.

    3,000 tokens have more tiles than programs run at a time. The copy engine does not write rows of 331 results. The
    last of several programs that share 1,296 columns has fewer of them. Scales of x follow one another by rows or by
    columns.
    """
    name = f"{'blocks' if groups[0] == BLOCK else 'rows'}_{tile[0]}x{tile[1]}_linear_scaled_sm90"
    rng = torch.Generator("cuda").manual_seed(1)
    shapes = (1, 140, 144), (130, 328, 400), (70, 331, 400), (300, 640, 1296), (3000, 2200, 1040)
    for tokens, outputs, columns in shapes:
        arguments = fp8_arguments(tokens, outputs, columns, groups, rng)
        x, weight, bias, scale, x_scale, out_dtype = arguments
        calls = [(x, weight, bias, scale, laid, out_dtype) for laid in (x_scale, x_scale, x_scale.t().contiguous().t())]
        with _launch.trial(name, launch) as asked:  # The counters are zero again after each call.
            got = [kernels_of("linear")["triton"].run(*call, variant="scaled_sm90") for call in calls]
        assert asked, name
        torch.testing.assert_close(got[0], ops.linear(*arguments), **NEAR)
        assert all(torch.equal(got[0], other) for other in got), "the order of the sums differs"


@on_hopper
@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize("block_size", [64, 128, 192, 256])
@pytest.mark.parametrize("scheme", ["blocks", "rows", "mxfp4", "int4", "int4 with zero points"])
def test_experts_by_every_tile(scheme, block_size):
    """Some experts are absent. Their rows are zero, although rows and scales of x hold NaN there."""
    how = _experts(scheme, 352, 328, "cuda")
    rng = torch.Generator("cuda").manual_seed(2)
    ids = torch.rand(300, 5, generator=rng, device="cuda").topk(2).indices.int()
    ids[100:120] = 3
    order = ops.permute(ids, 5, block_size, torch.tensor([0, 1, 2, -1, 4], dtype=torch.int32, device="cuda"))
    if "x_scale" in how:
        how["x_scale"][100:120] = float("nan")
    how |= {"bias": torch.randn(5, 328, generator=rng, device="cuda").bfloat16(), "out_dtype": torch.bfloat16}
    x, weight = how.pop("x"), how.pop("weight")
    wanted = ops.grouped_gemm(x, weight, *order, 2, **how)
    stored = scheme.split()[0] if "x_scale" not in how else "scaled"
    launch, tiles = f"{stored}_grouped_gemm_prefill_sm90", TILES if stored == "scaled" else PACKED_TILES
    for tile in tiles:
        with _launch.trial(launch, tile):
            got = kernels_of("grouped_gemm")["triton"].run(x, weight, *order, 2, **how, variant="prefill_sm90")
        torch.testing.assert_close(got, wanted, **NEAR)
        assert not got[200:240].any()


@on_hopper
@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize("tile", DECODE_TILES, ids=lambda tile: "-".join(map(str, tile.values())))
@pytest.mark.parametrize(("outputs", "inputs", "tokens"), [(328, 352, 1), (328, 352, 300), (1000, 2880, 60)])
@pytest.mark.parametrize("scheme", ["mxfp4", "int4 in 32", "int4 in 32 with zero points, fp16"])
def test_few_choices_by_packed_weights(scheme, outputs, inputs, tokens, tile):
    launch = f"{scheme.split()[0]}_grouped_gemm_decode_sm90"
    _check_few_choices(scheme, outputs, inputs, tokens, 16, "decode_sm90", launch, tile)


@on_hopper
@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize("tile", WIDE_DECODE_TILES, ids=lambda tile: "-".join(map(str, tile.values())))
@pytest.mark.parametrize(
    ("outputs", "inputs", "tokens"), [(328, 352, 1), (328, 352, 300), (33, 160, 9), (1000, 2880, 60)]
)
@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("scheme", ["int4", "int4, fp16", "int4 with zero points", "int4 with zero points, fp16"])
def test_few_choices_by_int4_weights_of_wide_groups(scheme, block_size, outputs, inputs, tokens, tile):
    launch = "int4_grouped_gemm_wide_decode_sm90"
    _check_few_choices(scheme, outputs, inputs, tokens, block_size, "wide_decode_sm90", launch, tile)


def _check_few_choices(scheme, outputs, inputs, tokens, block_size, variant, launch, tile) -> None:
    """Outputs and columns end within tiles, and programs within tiles too. One expert is absent, one has no choices.

    Some experts have several blocks. Every other row of x has an element a thousand times as large as the others.
    """
    how = _experts(scheme, inputs, outputs, "cuda")
    rng = torch.Generator("cuda").manual_seed(2)
    ids = torch.rand(tokens, 4, generator=rng, device="cuda").topk(2).indices.int()
    absent = ids == 3
    order = ops.permute(ids, 5, block_size, torch.tensor([0, 1, 2, -1, 4], dtype=torch.int32, device="cuda"))
    how["bias"] = torch.randn(5, outputs, generator=rng, device="cuda").bfloat16()
    how["x"][1::2, 5] *= 1000
    if "fp16" in scheme:
        how |= {name: how[name].half() for name in ("x", "weight_scale", "bias")}
    x, weight = how.pop("x")[:tokens], how.pop("weight")
    how["out_dtype"] = x.dtype
    wanted = ops.grouped_gemm(x, weight, *order, 2, **how)
    with _launch.trial(launch, tile) as sizes:
        for _ in range(2):  # the counters are zero again
            got = kernels_of("grouped_gemm")["triton"].run(x, weight, *order, 2, **how, variant=variant)
            torch.testing.assert_close(got, wanted, **NEAR)
            assert not got[absent.flatten()].any()
    assert sizes


@on_hopper
@pytest.mark.parametrize("tile", INT4_TILES, ids=lambda tile: "-".join(map(str, tile.values())))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("zero_points", [False, True])
def test_int4_by_every_tile(zero_points, dtype, tile):
    """Rows, outputs and columns end within tiles, and programs begin and end within tiles too.

    Groups have 32 columns or more.
    """
    rng = torch.Generator("cuda").manual_seed(3)
    shapes = (1, 40, 160, 1), (70, 328, 512, 4), (33, 328, 640, 10), (70, 200, 768, 24), (150, 4096, 4096, 32)
    for tokens, outputs, columns, groups in shapes:
        x = torch.randn(tokens, columns, generator=rng, device="cuda").to(dtype)
        weight = torch.randint(256, (outputs, columns // 2), generator=rng, device="cuda", dtype=torch.uint8)
        scale = (torch.randn(outputs, groups, generator=rng, device="cuda") * columns**-0.5 / 4).to(dtype)
        zero_point = torch.randint(16, scale.shape, generator=rng, device="cuda", dtype=torch.uint8)
        bias = torch.randn(outputs, generator=rng, device="cuda").to(dtype)
        arguments = (x, weight, bias, scale, None, dtype, zero_point if zero_points else None)
        with _launch.trial("linear_packed_sm90", tile):
            for _ in range(2):  # the counters are zero again
                got = kernels_of("linear")["triton"].run(*arguments, variant="packed_sm90")
                torch.testing.assert_close(got, ops.linear(*arguments), **NEAR)


def _picked_for_linear(tokens, groups=(BLOCK, TOKEN_BLOCK), columns=256, dtype=FP8, out_dtype=torch.bfloat16) -> str:
    group, x_group = groups
    x, weight = torch.zeros(tokens, columns).to(dtype), torch.zeros(384, columns).to(dtype)
    scales = (torch.ones(g.scale_shape(t.shape)) for g, t in ((group, weight), (x_group, x)))
    return linear.VARIANTS.of(None, x, weight, None, *scales, out_dtype)


def test_linear_takes_the_kernel_for_many_tokens_of_fp8():
    rows = (PER_ROW, PER_ROW)
    assert _picked_for_linear(4096) == _picked_for_linear(300, rows) == "scaled_sm90"
    assert _picked_for_linear(65) == _picked_for_linear(65, rows) == "scaled_sm90"
    assert _picked_for_linear(1) == _picked_for_linear(64) == _picked_for_linear(64, rows) == "decode_sm90"
    assert _picked_for_linear(300, (GroupShape(32, 32), GroupShape(1, 32))) == "scaled", "smaller blocks"
    assert _picked_for_linear(300, rows, columns=200) == "scaled", "rows that the copy engine does not take"
    assert _picked_for_linear(300, rows, dtype=INT8) == _picked_for_linear(300, out_dtype=torch.float32) == "scaled"
    with instead(Target("nvidia", "sm80")):
        assert _picked_for_linear(4096) == "scaled"


@pytest.mark.parametrize("tokens", [300, 2048])
def test_a_warm_up_launches_all_kernels(monkeypatch, tokens):
    """Which one a product takes depends on its tokens. Each tile but the widest has one that shares tiles."""

    def kernel_of(launch: scaled_calls_sm90.Launch) -> tuple[scaled_calls_sm90.Tile, bool]:
        return launch.tile, launch.schedule.whole < launch.tile.number(tokens, 4096)[1]

    launched = []
    monkeypatch.setattr(scaled_calls_sm90, "_launch_linear", lambda launch, *_: launched.append(kernel_of(launch)))
    monkeypatch.setattr(_launch, "multiprocessors", lambda device: 132)
    with instead(Target("nvidia", "sm90")):
        call = _call(tokens, 4096, 4096, "blocks")
        with _launch.warming_up():
            scaled_calls_sm90.scaled_linear(call, None)
        narrow, wide = scaled_calls_sm90.TILES[:2], scaled_calls_sm90.TILES[2]
        kernels = [(tile, shared) for tile in narrow for shared in (False, True)]
        assert sorted(launched) == sorted([*kernels, (wide, False)])
        launched.clear()
        scaled_calls_sm90.scaled_linear(call, None)
        assert launched == [kernel_of(scaled_calls_sm90.launch_of(call))]


def _call(tokens: int, outputs: int, columns: int, scheme: str) -> scaled_calls_sm90.Operands:
    groups = (PER_ROW, PER_ROW) if scheme == "rows" else (TOKEN_BLOCK, BLOCK)
    tensors = [torch.empty(shape, dtype=FP8, device="meta") for shape in ((tokens, columns), (outputs, columns))]
    x_scale, scale = (
        torch.empty(group.scale_shape(tensor.shape), device="meta")
        for group, tensor in zip(groups, tensors, strict=True)
    )
    return scaled_calls_sm90.Operands(*tensors, scale, x_scale, torch.bfloat16)


def test_tiles_are_those_that_keep_multiprocessors_busy(monkeypatch):
    monkeypatch.setattr(_launch, "multiprocessors", lambda device: 132)

    def chosen(tokens: int, outputs: int, scheme: str = "blocks") -> tuple[tuple[int, int], int]:
        """The tile, and how many of them are shared."""
        launch = scaled_calls_sm90.launch_of(_call(tokens, outputs, 4096, scheme))
        return launch.tile, launch.tile.number(tokens, outputs)[1] - launch.schedule.whole

    with instead(Target("nvidia", "sm90")):
        assert chosen(8192, 24576) == chosen(1089, 2560) == ((128, 256), 0), "90 tiles, and 180 of 128 outputs"
        assert chosen(1024, 6144) == chosen(1024, 6144, "rows") == ((128, 128), 0), "384 tiles, and 192 of 256"
        assert chosen(320, 6144, "rows") == ((64, 256), 0), "120 tiles, and 144 of 128 rows and outputs"
        assert chosen(1100, 2048) == ((128, 128), 12), "144 tiles, of which 12 would need another round"
        assert chosen(200, 768)[1] == 12, "all tiles are shared"


def _operands(scheme: str, block_size: int, **others: torch.Tensor) -> tuple[tuple, dict]:
    """Arguments of `grouped_gemm`: those by position, and the others."""
    how = _experts(scheme, 352, 160, "cpu") | others
    x, weight = how.pop("x"), how.pop("weight")
    order = torch.zeros(4 * block_size, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    return (x, weight, *order, 1), how | {"out_dtype": torch.bfloat16}


def _picked_for_experts(scheme: str, block_size: int, **others: torch.Tensor) -> str:
    arguments, how = _operands(scheme, block_size, **others)
    return grouped_gemm.VARIANTS.of(None, *arguments, **how)


@pytest.mark.parametrize("scheme", ["blocks", "rows", "mxfp4", "int4"])
def test_experts_take_the_kernel_for_blocks_that_fill_its_tiles(scheme):
    picked = {block_size: _picked_for_experts(scheme, block_size) for block_size in (16, 32, 64, 96, 128)}
    few = {"mxfp4": "decode_sm90", "int4": "wide_decode_sm90"}.get(scheme, "decode")
    assert picked == {16: few, 32: "prefill", 64: "prefill_sm90", 96: "prefill", 128: "prefill_sm90"}
    with instead(Target("nvidia", "sm80")):
        assert _picked_for_experts(scheme, 16) == "decode"


def test_experts_in_int4_take_the_kernels_for_few_choices_but_for_short_rows_in_groups_of_64():
    def picked(columns: int, groups: int, variant: str | None = None, **others: torch.Tensor) -> str:
        weight = torch.zeros(5, 160, columns // 2, dtype=torch.uint8)
        scale = torch.ones(5, 160, groups).bfloat16()
        others = {"x": torch.zeros(300, columns).bfloat16(), "weight": weight, "weight_scale": scale} | others
        arguments, how = _operands("int4", 16, **others)
        return grouped_gemm.VARIANTS.of(variant, *arguments, **how)

    assert picked(2048, 16) == picked(352, 1) == "wide_decode_sm90", "128 and all columns a scale"
    assert picked(352, 11) == "decode_sm90", "32 columns a scale"
    assert picked(4096, 64) == "decode_sm90", "long rows"
    assert picked(2048, 32) == "decode"
    assert picked(128, 1) == "decode", "rows of a single unit"
    assert picked(2048, 32, "decode_sm90") == "decode_sm90", "by request"
    with _launch.trial("int4_grouped_gemm_decode_sm90", {"rows": 64}):
        assert picked(4096, 64) == "decode_sm90", "whatever is tried for its launch"
    assert picked(4096, 32, x=torch.zeros(300, 4096).half()) == "wide_decode_sm90"
    assert picked(4096, 32, x=torch.zeros(300, 4096)) == "decode", "fp32"
    with instead(Target("nvidia", "sm80")):
        assert picked(4096, 32) == "decode"


def test_short_rows_of_mxfp4_take_the_kernel_for_every_gpu():
    weight, scale = (torch.zeros(5, 160, size, dtype=torch.uint8) for size in (64, 4))
    how = {"x": torch.zeros(300, 128).bfloat16(), "weight": weight, "weight_scale": scale.mT.contiguous().mT}
    assert _picked_for_experts("mxfp4", 16, **how) == "decode"


@pytest.mark.parametrize(("scale", "few"), [(0, "decode_sm90"), (191, "decode_sm90"), (192, "decode")])
def test_scales_of_mxfp4_that_one_kernel_cannot_hold_take_another(scale, few):
    """Bytes of 2**64 and 2**65. The result is the same, for experts are prepared once."""
    how = _experts("mxfp4", 352, 160, "cpu")
    given = how["weight_scale"].contiguous()
    given[3, 5, 2] = scale
    prepared = kernels_of("fused_experts")["triton"].prepared("w1_scale", given, w1=how["weight"])
    assert torch.equal(prepared, given)
    assert _picked_for_experts("mxfp4", 16, weight_scale=prepared) == few
    assert _picked_for_experts("mxfp4", 16, weight_scale=given) == "decode", "nobody has asked for its largest"


def test_experts_in_int4_take_it_for_stages_of_one_scale():
    def picked(groups: int) -> str:
        return _picked_for_experts("int4", 128, weight_scale=torch.ones(5, 160, groups).bfloat16())

    assert picked(1) == picked(3) == picked(6) == "prefill_sm90", "whole rows, 128 and 64 columns"
    assert picked(11) == "prefill", "32 columns"
    assert _picked_for_experts("int4", 128, x=torch.zeros(300, 352)) == "prefill", "fp32"
    with instead(Target("nvidia", "sm80")):
        assert picked(3) == "prefill"


@pytest.mark.parametrize("scheme", ["mxfp4", "int4"])
def test_packed_experts_take_the_kernel_of_their_blocks(scheme, monkeypatch):
    taken = []
    monkeypatch.setattr(mxfp4_sm90, "mxfp4_grouped_gemm", lambda *_: taken.append("mxfp4"))
    monkeypatch.setattr(packed_sm90, "packed_grouped_gemm", lambda *_: taken.append("packed"))
    for block_size in (64, 128, 256):
        arguments, how = _operands(scheme, block_size)
        grouped_gemm.grouped_gemm(*arguments, **how)
    assert taken == {"mxfp4": ["mxfp4", "mxfp4", "packed"], "int4": ["packed"] * 3}[scheme]


def _blocks(scheme: str, target: Target, **others: torch.Tensor) -> list[int]:
    """The choices of a block, for means of 8, 9, 16, 17, 32, 33, 128, 129 and 4,096 choices of an expert."""
    how = _experts(scheme, 352, 160, "cpu") | others
    blocks = []
    with instead(target):
        for mean in (8, 9, 16, 17, 32, 33, 128, 129, 4096):
            ids = torch.zeros(5 * mean, 1, dtype=torch.int32)
            call = fused_experts.describe(how["x"], how["weight"], None, None, ids, w1_scale=how["weight_scale"])
            variant = fused_experts.VARIANTS.pick(call)
            blocks.append(fused_experts.launch_parameters(call, variant)["block"])
    return blocks


@pytest.mark.parametrize(("scheme", "few"), [("mxfp4", [16, 16, 16, 64]), ("int4", [16, 64, 64, 64])])
def test_choices_make_blocks_for_the_fastest_tiles_of_packed_weights(scheme, few):
    """gpt-oss-20B's 128 tokens have a mean of 16."""
    assert _blocks(scheme, Target("nvidia", "sm90")) == [*few, 64, 128, 128, 256, 256]


@pytest.mark.parametrize(("groups", "few"), [(3, 8), (6, 16)], ids=["128 columns a scale", "64"])
def test_few_choices_of_int4_make_blocks_of_eight_in_wide_groups(groups, few):
    how = _experts("int4", 352, 160, "cpu")
    scale = torch.ones(5, 160, groups).bfloat16()
    for mean, block in ((1, few), (7, few), (8, 16)):
        ids = torch.zeros(5 * mean, 1, dtype=torch.int32)
        call = fused_experts.describe(how["x"], how["weight"], None, None, ids, w1_scale=scale)
        assert fused_experts.launch_parameters(call, "decode")["block"] == block


def test_scales_by_position_name_the_launch_too():
    how, nothing = _experts("mxfp4", 352, 160, "cpu"), [None] * 8
    arguments = how["x"], how["weight"], None, None, torch.zeros(5, 1), "silu", *nothing
    assert fused_experts.describe(*arguments, how["weight_scale"], None).launch == "mxfp4_fused_experts"


@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100"])
def test_blocks_are_no_larger_than_tiles_of_other_kernels(target):
    groups_of_32 = {"weight_scale": torch.ones(5, 160, 11).bfloat16()}
    assert max(_blocks("int4", Target("nvidia", target), **groups_of_32)) == grouped_gemm.MOST_ROWS
    assert max(_blocks("blocks", Target("nvidia", target))) == grouped_gemm.MOST_ROWS
