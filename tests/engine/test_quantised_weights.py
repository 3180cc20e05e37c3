"""Models with fp8, int8 and int4 weights give the tokens of the same weights in bf16, whatever their format."""

import re
import shutil
from pathlib import Path

import models
import pytest
import quantised
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from engines import generate, report, runner, served, tokens
from vllm.model_executor.kernels.linear import MPLinearLayerConfig

from vllm_opset import ops, selection, targets
from vllm_opset.model.layers import OpsetLayer
from vllm_opset.ops.schemes import PER_TENSOR, GroupShape, dequantise

pytestmark = [pytest.mark.engine, pytest.mark.window]
PER_TOKEN, PER_GROUP = GroupShape(1, -1), GroupShape(1, 128)
# Formats of int4. The values are the method, the columns of a group, and whether there are zero points.
INT4 = {
    "awq": ("awq", 32, True),
    "gptq": ("gptq", 64, False),
    "int4": ("compressed-tensors", -1, False),
    "int4, zero points": ("compressed-tensors", 32, True),
}
FORMATS = (
    "plain", "channelwise", "static", "blockwise", "plain, int8", "int8", "static, int8", "plain, int4", *INT4
)  # fmt: skip
PROMPTS = models.prompts((1, 7, 16, 40, 77))
NUM_TOKENS = 48


def saved(model: str, tmp_path_factory) -> dict[str, Path]:
    """The folders of a model's checkpoints, by their formats."""
    folders = {name: tmp_path_factory.mktemp(f"{model}, {name}") for name in FORMATS}
    quantised.save_plain(folders["plain"], quantised.FP8, model)
    quantised.save_compressed(folders["plain"], folders["channelwise"], quantised.FP8)
    quantised.save_compressed(folders["plain"], folders["static"], quantised.FP8, "tensor")
    quantised.save_blockwise(folders["plain"], folders["blockwise"])
    quantised.save_plain(folders["plain, int8"], quantised.INT8, model)
    quantised.save_compressed(folders["plain, int8"], folders["int8"], quantised.INT8)
    quantised.save_compressed(folders["plain, int8"], folders["static, int8"], quantised.INT8, "tensor")
    quantised.save_plain(folders["plain, int4"], quantised.INT4, model)
    for name, form in INT4.items():
        quantised.save_int4(folders["plain, int4"], folders[name], *form)
    return folders


def answers(llm) -> list[list[int]]:
    return tokens(generate(llm, PROMPTS, max_tokens=NUM_TOKENS))


def answers_of_plain(folders: dict[str, Path], engine) -> dict[str, list[list[int]]]:
    """The tokens of the weights that each dtype's checkpoints stand for."""

    def of(name: str) -> list[list[int]]:
        with engine(folders[name], dtype="bfloat16") as llm:
            return answers(llm)

    return {"float8_e4m3fn": of("plain"), "int8": of("plain, int8"), "uint4": of("plain, int4")}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    return saved("qwen3", tmp_path_factory)


@pytest.fixture(scope="module")
def expected(checkpoints, engine) -> dict[str, list[list[int]]]:
    return answers_of_plain(checkpoints, engine)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU quantises activations, and the next test checks that: runs without one"
)
@pytest.mark.parametrize(
    ("name", "arguments", "dtype", "groups"),
    [
        ("plain", {"quantization": "fp8"}, "float8_e4m3fn", ["per tensor"]),
        ("channelwise", {}, "float8_e4m3fn", ["per row"]),
        ("static", {}, "float8_e4m3fn", ["per tensor"]),
        ("blockwise", {}, "float8_e4m3fn", ["128x128"]),
        ("int8", {}, "int8", ["per row"]),
        ("static, int8", {}, "int8", ["per tensor", "per row"]),  # fused layers with a scale each have one per row
        ("awq", {}, "uint4", ["1x32 with zero points"]),
        ("gptq", {}, "uint4", ["1x64"]),
        ("int4", {}, "uint4", ["per row"]),
        ("int4, zero points", {}, "uint4", ["1x32 with zero points"]),
    ],
)
def test_quantised_weights_serve_as_what_they_stand_for(name, arguments, dtype, groups, checkpoints, expected, engine):
    with engine(checkpoints[name], dtype="bfloat16", **arguments) as llm:
        assert answers(llm) == expected[dtype]
        rows = [row for row in report(llm) if row["op"] == "linear"]
        assert {row["kernel"] for row in rows if dtype in row["problem"]} == {"cpp"}
        schemes = {row["problem"].partition("scheme=")[2] for row in rows if row["calls"]}
        # The head is not quantised.
        assert schemes == {"none", *(f"{dtype} {group} by activations as they are" for group in groups)}
        with pytest.raises(Exception, match="packed this model's weights"):
            llm.collective_rpc("save_sharded_state", kwargs={"path": "unused"})
        if name == "static, int8" or (name.startswith("gptq") and "has_g_idx" in MPLinearLayerConfig.__annotations__):
            # vLLM counts the one scale of a fused layer's activations once for each part, and so did vLLM 0.26 with the
            # groups of GPTQ's inputs. So when it loads weights again, it takes the layer for complete too early.
            # Missing scales of int8 are then named as NaN; GPTQ's hold what was in memory.
            return
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoints[name])})
        llm.reset_prefix_cache()
        assert answers(llm) == expected[dtype]


def multiplies_in_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, let the CPU's target say that it multiplies matrices in fp8 and int8."""
    if not torch.cuda.is_available():
        cpu = targets.of("cpu")
        like_a_gpu = targets.Target(cpu.vendor, cpu.architecture, cpu.features | {targets.FP8, targets.INT8})
        monkeypatch.setattr(targets, "_found", lambda device_type: like_a_gpu)


QUANTISING = {"rms_norm_quant", "fused_add_rms_norm_quant", "silu_and_mul_quant"}
UNFUSED = {op.removesuffix("_quant"): "reference" for op in QUANTISING}


def quantising_layers(monkeypatch: pytest.MonkeyPatch) -> dict:
    """Arguments of an engine whose norms and activations quantise, as on a GPU, where no kernel for a CPU does.

    The references give the same numbers with and without that.
    """
    if torch.cuda.is_available():
        return {}
    monkeypatch.setattr(selection, "why_no_kernel", lambda op, problem: None)
    worker = {"worker_cls": "fusing_worker.QuantisingWorker", "max_num_batched_tokens": 64}
    return worker | {"additional_config": {"opset": {"kernels": UNFUSED}}}


def assert_the_same_without_fusing(llm, answered: list[list[int]]) -> None:
    """Ask again after the layers were set back, where no graphs were captured before."""
    if torch.cuda.is_available():
        return
    assert "rms_norm" in served(llm), "of queries and keys"
    for layer in runner(llm).get_model().modules():
        if isinstance(layer, OpsetLayer):
            layer.forward = layer._forward_method
    llm.reset_prefix_cache()
    assert answers(llm) == answered


@pytest.mark.parametrize(
    ("name", "dtype", "group", "scale_name"),
    [
        ("plain", quantised.FP8, PER_TOKEN, None),  # vLLM quantises it while it loads
        ("channelwise", quantised.FP8, PER_TOKEN, "weight_scale"),
        ("blockwise", quantised.FP8, PER_GROUP, "weight_scale_inv"),
        ("static", quantised.FP8, PER_TENSOR, "weight_scale"),
        ("int8", quantised.INT8, PER_TOKEN, "weight_scale"),
        ("static, int8", quantised.INT8, PER_TENSOR, "weight_scale"),
    ],
)
def test_activations_are_quantised_where_the_device_multiplies_them(
    name, dtype, group, scale_name, checkpoints, engine, monkeypatch
):
    multiplies_in_eight_bits(monkeypatch)
    layer = "model.layers.1.mlp.down_proj"
    stored = quantised.load_file(checkpoints[name] / "model.safetensors")
    weight, arguments = stored[f"{layer}.weight"].float(), {"quantization": "fp8"}
    if scale_name is not None:
        weight_scale, arguments = stored[f"{layer}.{scale_name}"], {}
        weight_scale = weight_scale.view(-1, 1) if weight_scale.ndim == 1 else weight_scale
        weight = dequantise(stored[f"{layer}.weight"], weight_scale, torch.float32)
    x_scale = torch.full((1, 1), quantised.INPUT_SCALE) if group is PER_TENSOR else None
    x = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(2)).bfloat16()
    expected = dequantise(*ops.quantise(x, dtype, list(group), x_scale), torch.float32) @ weight.T
    with engine(checkpoints[name], dtype="bfloat16", **arguments, **quantising_layers(monkeypatch)) as llm:
        answered = answers(llm)
        assert served(llm).keys() >= QUANTISING
        assert_the_same_without_fusing(llm, answered)
        down_proj = runner(llm).model.get_submodule(layer)
        found = down_proj.quant_method.apply(down_proj, x.to(down_proj.weight.device)).cpu()
        schemes = {row["problem"].partition("scheme=")[2] for row in report(llm) if row["op"] == "linear"}
    assert any(scheme.endswith(f"by {str(dtype).removeprefix('torch.')} {group}") for scheme in schemes)
    # Rounding to bf16 gives 2**-9. Activations that are not quantised would give 2**-5 for fp8 and 2**-7 for int8.
    assert (found.float() - expected).norm() < 2**-8 * expected.norm()


DAMAGES = pytest.mark.parametrize(
    "damage",
    [lambda weights, name: weights[name].fill_(float("nan")), lambda weights, name: weights.pop(name)],
    ids=["NaN", "missing"],
)


def damaged(checkpoint: Path, damage, name: str, folder: Path) -> Path:
    """A copy of a checkpoint in which a tensor is damaged."""
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    weights = quantised.load_file(folder / "model.safetensors")
    damage(weights, name)
    quantised.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@DAMAGES
def test_a_damaged_scale_is_named(damage, checkpoints, engine, tmp_path):
    folder = damaged(checkpoints["channelwise"], damage, "model.layers.1.mlp.down_proj.weight_scale", tmp_path)
    named = r"model\.layers\.1\.mlp\.down_proj\.weight_scale holds NaN: the checkpoint is damaged, or lacks it"
    with pytest.raises(Exception, match=named), engine(folder, dtype="bfloat16"):
        pass


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("channelwise", "weight_scale"),
        ("static", "weight_scale"),
        ("static", "input_scale"),
        ("blockwise", "weight_scale_inv"),
        ("int8", "weight_scale"),
        ("static, int8", "weight_scale"),
        ("awq", "scales"),
        ("gptq", "scales"),
        ("int4", "weight_scale"),
        ("int4, zero points", "weight_scale"),
    ],
)
def test_a_missing_scale_of_a_part_of_a_fused_layer_is_named(name, scale, checkpoints, engine, tmp_path):
    missing = f"model.layers.1.self_attn.k_proj.{scale}"
    folder = damaged(checkpoints[name], lambda weights, name: weights.pop(name), missing, tmp_path)
    named = rf"model\.layers\.1\.self_attn\.qkv_proj\.{scale} holds NaN.*: the checkpoint is damaged, or lacks it"
    with pytest.raises(Exception, match=named), engine(folder, dtype="bfloat16"):
        pass


@pytest.mark.parametrize(
    ("name", "scale"), [("channelwise", "weight_scale"), ("blockwise", "weight_scale_inv"), ("awq", "scales")]
)
def test_a_scale_of_another_granularity_is_named(name, scale, checkpoints, engine, tmp_path):
    def shorten(weights: dict[str, torch.Tensor], name: str) -> None:
        weights[name] = weights[name][:1, :1].contiguous()

    folder = damaged(checkpoints[name], shorten, f"model.layers.1.mlp.down_proj.{scale}", tmp_path)
    named = rf"model\.layers\.1\.mlp\.down_proj\.{scale} has another granularity than config.json says: \[1, 1\] in"
    with pytest.raises(Exception, match=named), engine(folder, dtype="bfloat16"):
        pass


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory) -> dict[str, Path]:
    """The same formats of a mixture of experts."""
    return saved("qwen3_moe", tmp_path_factory)


@pytest.fixture(scope="module")
def expected_of_mixtures(mixtures, engine) -> dict[str, list[list[int]]]:
    return answers_of_plain(mixtures, engine)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU quantises activations, and the next test checks that: runs without one"
)
@pytest.mark.parametrize(
    ("name", "arguments", "dtype", "group"),
    [
        ("plain", {"quantization": "fp8"}, "float8_e4m3fn", "per tensor"),
        ("channelwise", {}, "float8_e4m3fn", "per row"),
        ("static", {}, "float8_e4m3fn", "per tensor"),
        ("blockwise", {}, "float8_e4m3fn", "128x128"),
        ("int8", {}, "int8", "per row"),
        ("awq", {}, "uint4", "1x32 with zero points"),
        ("gptq", {}, "uint4", "1x64"),
        ("int4", {}, "uint4", "per row"),
        ("int4, zero points", {}, "uint4", "1x32 with zero points"),
    ],
)
def test_quantised_experts_serve_as_what_they_stand_for(
    name, arguments, dtype, group, mixtures, expected_of_mixtures, engine
):
    with engine(mixtures[name], dtype="bfloat16", **arguments) as llm:
        assert answers(llm) == expected_of_mixtures[dtype]
        (row,) = (row for row in report(llm) if row["op"] == "fused_experts")
        assert row["kernel"] == "cpp" and row["calls"]
        assert f"scheme={dtype} {group} by activations as they are," in row["problem"]
        # Experts in fp8 and int8 stay as they were loaded; attention's layers do not.
        cure = "without int4 weights" if dtype == "uint4" else re.escape("{'linear': 'reference'}".replace("'", '"'))
        with pytest.raises(Exception, match=f"packed this model's weights.*{cure}"):
            llm.collective_rpc("save_sharded_state", kwargs={"path": "unused"})
        if name in ("blockwise", "awq"):
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(mixtures[name])})
            llm.reset_prefix_cache()
            assert answers(llm) == expected_of_mixtures[dtype]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU multiplies int4 by 16 bits alone: runs without one")
def test_a_quantised_shared_expert_gives_the_tokens_of_transformers(engine, tmp_path):
    reference = quantised.build("qwen2_moe", tmp_path)
    with engine(tmp_path) as llm:
        assert answers(llm) == [models.generate(reference, prompt, NUM_TOKENS)[0] for prompt in PROMPTS]
        rows = [row for row in report(llm) if "scheme=uint4 1x32 with zero points" in row["problem"]]
    assert {(row["op"], row["kernel"]) for row in rows if row["calls"]} == {("linear", "cpp"), ("fused_experts", "cpp")}
    assert any("in_features=256, out_features=128" in row["problem"] for row in rows), "the shared expert's last layer"


@pytest.mark.parametrize(
    ("name", "dtype", "weight_group", "group"),
    [
        ("channelwise", quantised.FP8, PER_TOKEN, PER_TOKEN),
        ("blockwise", quantised.FP8, GroupShape(128, 128), PER_GROUP),
        ("static", quantised.FP8, PER_TENSOR, PER_TENSOR),
        ("int8", quantised.INT8, PER_TOKEN, PER_TOKEN),
    ],
)
def test_experts_quantise_activations_where_the_device_multiplies_them(
    name, dtype, weight_group, group, mixtures, engine, monkeypatch
):
    multiplies_in_eight_bits(monkeypatch)
    with engine(mixtures[name], dtype="bfloat16", **quantising_layers(monkeypatch)) as llm:
        answered = answers(llm)
        assert QUANTISING & served(llm).keys() == {"rms_norm_quant", "fused_add_rms_norm_quant"}  # for attention
        assert_the_same_without_fusing(llm, answered)
        (row,) = (row for row in report(llm) if row["op"] == "fused_experts")
    kind = str(dtype).removeprefix("torch.")
    assert f"scheme={kind} {weight_group} by {kind} {group}," in row["problem"]


@DAMAGES
@pytest.mark.parametrize(
    ("name", "scale_name"), [("channelwise", "weight_scale"), ("blockwise", "weight_scale_inv"), ("awq", "scales")]
)
def test_a_damaged_scale_of_an_expert_is_named(damage, name, scale_name, mixtures, engine, tmp_path):
    folder = damaged(mixtures[name], damage, f"model.layers.1.mlp.experts.5.down_proj.{scale_name}", tmp_path)
    named = rf"model\.layers\.1\.mlp\.experts.*\.w2_{scale_name} holds NaN, .* for expert 5: the checkpoint is damaged"
    with pytest.raises(Exception, match=named), engine(folder, dtype="bfloat16"):
        pass


def test_int4_checkpoints_are_packed_as_compressed_tensors_packs_them():
    generator = torch.Generator().manual_seed(3)
    values, zeros = (torch.randint(0, 16, shape, generator=generator) for shape in ((16, 64), (16, 2)))
    tensors = quantised.LAYOUTS["compressed-tensors"](values, torch.ones(16, 2), zeros, True)
    assert torch.equal(tensors["weight_packed"], pack_to_int32((values - 8).to(torch.int8), 4))
    assert torch.equal(tensors["weight_zero_point"], pack_to_int32((zeros - 8).to(torch.int8), 4, packed_dim=0))
