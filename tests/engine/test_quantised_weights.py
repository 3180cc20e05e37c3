"""Models with fp8, int8 and int4 weights give the tokens of the same weights in bf16, whatever their format."""

import json
import re
from pathlib import Path

import models
import pytest
import quantised
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from engines import report, runner, served
from quantised_answers import (
    NOT_ON_GPU,
    PER_GROUP,
    PER_TOKEN,
    QUANTISING,
    answers,
    answers_of_plain,
    assert_refused,
    assert_the_same_without_fusing,
    damaged,
    lose,
    multiplies_in_eight_bits,
    quantising_layers,
    saved,
)
from vllm.model_executor.kernels.linear import MPLinearLayerConfig

from vllm_opset import ops
from vllm_opset.ops.schemes import PER_TENSOR, dequantise
from vllm_opset.unsupported import Refusal

pytestmark = [pytest.mark.engine, pytest.mark.window]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    return saved("qwen3", tmp_path_factory)


@pytest.fixture(scope="module")
def expected(checkpoints, engine) -> dict[str, list[list[int]]]:
    return answers_of_plain(checkpoints, engine)


LOST = {"channelwise": "o_proj.weight_scale", "blockwise": "k_proj.weight"}  # when weights are loaded again


@NOT_ON_GPU
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
def test_quantised_weights_serve_as_what_they_stand_for(
    name, arguments, dtype, groups, checkpoints, expected, engine, tmp_path
):
    with engine(checkpoints[name], dtype="bfloat16", **arguments) as llm:
        assert answers(llm) == expected[dtype]
        rows = [row for row in report(llm) if row["op"] == "linear"]
        assert {row["kernel"] for row in rows if dtype in row["problem"]} == {"cpp"}
        schemes = {row["problem"].partition("scheme=")[2] for row in rows if row["calls"]}
        # The head is not quantised.
        assert schemes == {"none", *(f"{dtype} {group} by activations as they are" for group in groups)}
        with pytest.raises(Exception, match="packed this model's weights"):
            llm.collective_rpc("save_sharded_state", kwargs={"path": "unused"})
        if name.startswith("gptq") and "has_g_idx" in MPLinearLayerConfig.__annotations__:
            # Up to 0.29, vLLM counts the groups of GPTQ's inputs once for each part of a fused layer. So when it loads
            # weights again, it takes the layer for complete too early, and what was not loaded is named as missing.
            with pytest.raises(Exception, match="is missing in the checkpoint"):
                llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoints[name])})
            return
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoints[name])})
        llm.reset_prefix_cache()
        assert answers(llm) == expected[dtype]
        if name in LOST:
            folder = damaged(checkpoints[name], lose, f"model.layers.1.self_attn.{LOST[name]}", tmp_path)
            with pytest.raises(Exception, match="is missing in the checkpoint"):
                llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})


@NOT_ON_GPU
def test_a_quantised_head_serves_as_what_it_stands_for(engine, tmp_path):
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    packed.mkdir()
    quantised.save_plain(plain, quantised.INT4, tie_word_embeddings=False)
    quantised.save_int4(plain, packed, "compressed-tensors", 32, zero_points=True, with_head=True)
    with engine(plain, dtype="bfloat16") as llm:
        expected = answers(llm)
    with engine(packed, dtype="bfloat16") as llm:
        assert answers(llm) == expected
        of_head = f"out_features={models.VOCABULARY}, scheme=uint4 1x32 with zero points"
        assert any(of_head in row["problem"] for row in report(llm) if row["calls"])


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


def test_a_damaged_scale_is_named(checkpoints, engine, tmp_path):
    scale = "model.layers.1.mlp.down_proj.weight_scale"
    folder = damaged(checkpoints["channelwise"], lambda weights, name: weights[name].fill_(torch.nan), scale, tmp_path)
    named = rf"{re.escape(scale)} holds NaN.*: the checkpoint is damaged, or lacks it"
    assert_refused(folder, engine, named)


def test_a_layer_that_the_checkpoint_lacks_as_a_whole_is_named_by_its_scale(checkpoints, engine, tmp_path):
    folder = damaged(checkpoints["channelwise"], lose, "model.layers.1.mlp.down_proj", tmp_path)
    named = r"model\.layers\.1\.mlp\.down_proj\.weight_scale holds NaN.*: the checkpoint is damaged, or lacks it"
    assert_refused(folder, engine, named)


K_PROJ, O_PROJ = ("k_proj", r"qkv_proj\.{} \(k\)"), ("o_proj", r"o_proj\.{}")  # a part of a layer, and a whole one


@pytest.mark.parametrize(
    ("name", "tensor", "layer"),
    [
        ("channelwise", "weight", K_PROJ),
        ("channelwise", "weight", O_PROJ),
        ("channelwise", "weight_scale", K_PROJ),
        ("channelwise", "weight_scale", O_PROJ),
        ("static", "weight_scale", K_PROJ),
        ("static", "input_scale", K_PROJ),
        ("blockwise", "weight", K_PROJ),
        ("blockwise", "weight_scale_inv", K_PROJ),
        ("int8", "weight", K_PROJ),
        ("int8", "weight_scale", K_PROJ),
        ("static, int8", "weight_scale", K_PROJ),
        ("static, int8", "input_scale", K_PROJ),
        ("awq", "qweight", K_PROJ),
        ("awq", "qzeros", O_PROJ),
        ("awq", "scales", K_PROJ),
        ("gptq", "qweight", O_PROJ),
        ("gptq", "scales", K_PROJ),
        ("int4", "weight_scale", K_PROJ),
        ("int4, zero points", "weight_packed", O_PROJ),
        ("int4, zero points", "weight_scale", K_PROJ),
        ("int4, zero points", "weight_zero_point", K_PROJ),
    ],
)
def test_a_missing_tensor_is_named(name, tensor, layer, checkpoints, engine, tmp_path):
    of_checkpoint, of_model = layer
    folder = damaged(checkpoints[name], lose, f"model.layers.1.self_attn.{of_checkpoint}.{tensor}", tmp_path)
    named = rf"model\.layers\.1\.self_attn\.{of_model.format(tensor)} is missing in the checkpoint"
    assert_refused(folder, engine, named)


@pytest.mark.parametrize("layer", [K_PROJ, O_PROJ], ids=["part", "whole"])
def test_a_missing_weight_that_vllm_would_quantise_is_named(layer, checkpoints, engine, tmp_path):
    of_checkpoint, of_model = layer
    folder = damaged(checkpoints["plain"], lose, f"model.layers.1.self_attn.{of_checkpoint}.weight", tmp_path)
    named = rf"model\.layers\.1\.self_attn\.{of_model.format('weight')} is missing in the checkpoint"
    assert_refused(folder, engine, named, quantization="fp8")


def test_no_weight_of_a_layer_that_vllm_quantises_is_missing_where_none_is_read(checkpoints, engine):
    with engine(checkpoints["plain"], dtype="bfloat16", quantization="fp8", load_format="dummy") as llm:
        assert answers(llm)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("channelwise", "weight_scale"),
        ("blockwise", "weight_scale_inv"),
        ("int8", "weight"),
        ("awq", "scales"),
        ("awq", "qzeros"),
        ("gptq", "qzeros"),
        ("gptq", "qweight"),
        ("int4, zero points", "weight_zero_point"),
    ],
)
def test_a_tensor_of_another_size_is_named(name, tensor, checkpoints, engine, tmp_path):
    def shorten(weights: dict[str, torch.Tensor], name: str) -> None:
        weights[name] = weights[name][:1, :1].contiguous()

    folder = damaged(checkpoints[name], shorten, f"model.layers.1.mlp.up_proj.{tensor}", tmp_path)
    gate_up = rf"model\.layers\.1\.mlp\.gate_up_proj\.{tensor} \(1\)"
    said = r"cannot be loaded: \[1, 1\] in the checkpoint, into .* \(all parts, in this worker\): .*Error\("
    assert_refused(folder, engine, f"{gate_up} {said}")


@pytest.mark.parametrize(
    ("sizes", "layer", "parts"),
    [
        ({"intermediate_size": 224}, "mlp.gate_up_proj", "224, 224"),  # whose scales fit into vLLM's parameter
        ({"intermediate_size": 192}, "mlp.gate_up_proj", "192, 192"),
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, "self_attn.qkv_proj", "576, 192, 192"),
    ],
)
def test_parts_that_end_inside_a_block_are_refused_before_weights_are_loaded(sizes, layer, parts, engine, tmp_path):
    quantised.save_plain(tmp_path, quantised.FP8, **sizes)
    quantised.save_blockwise(tmp_path, tmp_path)
    quantised.save_file({}, tmp_path / "model.safetensors", {"format": "pt"})
    refused = rf"fp8 blocks of 128 x 128 in model\.layers\.0\.{layer}, whose parts of {parts} rows end inside a block"
    with pytest.raises(Refusal, match=refused), engine(tmp_path, dtype="bfloat16"):
        pass


@pytest.mark.parametrize(("method", "zero_points"), [("awq", True), ("gptq", False), ("compressed-tensors", True)])
def test_int4_weights_of_incomplete_groups_are_refused_before_they_are_loaded(method, zero_points, engine, tmp_path):
    quantised.save_plain(tmp_path, quantised.INT4, intermediate_size=208)
    quantised.save_int4(tmp_path, tmp_path, method, -1, zero_points)
    weights = quantised.load_file(tmp_path / "model.safetensors")
    values = {name: weights[name] for name in weights if name.endswith(("qweight", "weight_packed"))}
    quantised.save_file(values, tmp_path / "model.safetensors", {"format": "pt"})  # vLLM looks up what GPTQ quantised
    said = r"with 208 columns in model\.layers\.0\.mlp\.down_proj, which are no multiple of 32: choose another"
    assert_refused(tmp_path, engine, f"int4 weights {said}")


@NOT_ON_GPU
def test_quantised_embeddings_are_refused_without_triton_before_weights_are_loaded(checkpoints, engine, tmp_path):
    config = json.loads((checkpoints["int4"] / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["targets"].append("re:.*embed_tokens")
    (tmp_path / "config.json").write_text(json.dumps(config))
    quantised.save_file({}, tmp_path / "model.safetensors", {"format": "pt"})
    refused = r"quantised embeddings without Triton, as model\.embed_tokens has them: choose a checkpoint"
    with pytest.raises(Refusal, match=f"on a CPU does not support {refused}"), engine(tmp_path, dtype="bfloat16"):
        pass


def test_int4_checkpoints_are_packed_as_compressed_tensors_packs_them():
    generator = torch.Generator().manual_seed(3)
    values, zeros = (torch.randint(0, 16, shape, generator=generator) for shape in ((16, 64), (16, 2)))
    tensors = quantised.LAYOUTS["compressed-tensors"](values, torch.ones(16, 2), zeros, True)
    assert torch.equal(tensors["weight_packed"], pack_to_int32((values - 8).to(torch.int8), 4))
    assert torch.equal(tensors["weight_zero_point"], pack_to_int32((zeros - 8).to(torch.int8), 4, packed_dim=0))
