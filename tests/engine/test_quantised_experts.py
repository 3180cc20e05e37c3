"""Mixtures of experts with fp8, int8 and int4 weights give the tokens of the same weights in bf16."""

import json
import re
from functools import partial
from pathlib import Path

import models
import pytest
import quantised
import torch
from engines import chosen, generate, report, served
from quantised_answers import (
    NOT_ON_GPU,
    NUM_TOKENS,
    PER_GROUP,
    PER_TOKEN,
    PROMPTS,
    QUANTISING,
    answers,
    answers_of_plain,
    assert_refused,
    assert_rounding_alone,
    assert_the_same_without_fusing,
    damaged,
    lose,
    multiplies_in_eight_bits,
    quantising_layers,
    saved,
)
from vllm.model_executor.kernels.linear import MPLinearLayerConfig
from vllm.model_executor.layers.fused_moe import RoutedExperts

from vllm_opset.model import experts
from vllm_opset.model.int4_experts import LOADED_BIASES
from vllm_opset.ops.schemes import PER_TENSOR, GroupShape

pytestmark = [pytest.mark.engine, pytest.mark.window]
RELOADS_GPTQ = "has_g_idx" not in MPLinearLayerConfig.__annotations__  # see test_quantised_weights.py


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory) -> dict[str, Path]:
    """The same formats of a mixture of experts."""
    return saved("qwen3_moe", tmp_path_factory)


@pytest.fixture(scope="module")
def expected_of_mixtures(mixtures, engine) -> dict[str, list[list[int]]]:
    return answers_of_plain(mixtures, engine)


@NOT_ON_GPU
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
        if name in ("blockwise", "awq") or (name == "gptq" and RELOADS_GPTQ):
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


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="a CPU gives the tokens of the plain weights, which another test checks"
)
@pytest.mark.parametrize(
    ("name", "group"),
    [("awq", "1x32 with zero points"), ("gptq", "1x64"), ("int4, zero points", "1x32 with zero points")],
)
def test_int4_experts_round_as_bf16_does(name, group, mixtures, engine):
    with engine(mixtures[name], dtype="bfloat16") as llm:
        answered = chosen(generate(llm, PROMPTS, max_tokens=NUM_TOKENS, logprobs=0))
        (row,) = (row for row in report(llm) if row["op"] == "fused_experts")
    assert f"scheme=uint4 {group} by activations as they are," in row["problem"]
    assert row["kernel"] != "reference" and row["calls"]
    assert_rounding_alone(name, mixtures, answered)


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
        answered = chosen(generate(llm, PROMPTS, max_tokens=NUM_TOKENS, logprobs=0))
        assert QUANTISING & served(llm).keys() == {"rms_norm_quant", "fused_add_rms_norm_quant"}  # for attention
        assert_the_same_without_fusing(llm, [answer for answer, _ in answered])
        (row,) = (row for row in report(llm) if row["op"] == "fused_experts")
    kind = str(dtype).removeprefix("torch.")
    assert f"scheme={kind} {weight_group} by {kind} {group}," in row["problem"]
    assert row["kernel"] != "reference" and row["calls"]
    assert_rounding_alone(name, mixtures, answered)


@pytest.mark.parametrize(
    ("name", "scale_name", "said"),
    [
        ("channelwise", "weight_scale", " for expert 5"),
        ("blockwise", "weight_scale_inv", " for expert 5"),
        ("awq", "scales", " for expert 5"),
        ("static", "input_scale", ""),  # the largest of all experts serves them all
    ],
)
def test_a_damaged_scale_of_an_expert_is_named(name, scale_name, said, mixtures, engine, tmp_path):
    scale = f"model.layers.1.mlp.experts.5.down_proj.{scale_name}"
    folder = damaged(mixtures[name], lambda weights, name: weights[name].fill_(torch.nan), scale, tmp_path)
    named = rf"model\.layers\.1\.mlp\.experts.*\.w2_{scale_name} holds NaN, .*{said}: the checkpoint is damaged"
    assert_refused(folder, engine, named)


@NOT_ON_GPU
@pytest.mark.parametrize("size", [0.0, 0.5])
def test_biases_of_gptq_experts_count_though_the_model_declares_none(size, mixtures, engine, tmp_path):
    """Zeros change nothing. The same bias of all experts' last products is added to each token, once.

    It ends when weights are loaded again from a checkpoint without biases.
    """
    if LOADED_BIASES not in RoutedExperts.__init__.__code__.co_names:
        pytest.skip("vLLM 0.26 loads no such biases: ends when 0.27 is the oldest supported release")
    biases: dict[int, torch.Tensor] = {}

    def add_biases(weights: dict[str, torch.Tensor], _: str) -> None:
        for name in [name for name in weights if ".experts." in name and name.endswith(".scales")]:
            layer, bias = int(name.split(".")[2]), torch.zeros(weights[name].shape[1], dtype=torch.bfloat16)
            if "down_proj" in name:
                bias.normal_(0, size, generator=torch.Generator().manual_seed(layer))
                biases[layer] = bias
            weights[name.replace(".scales", ".bias")] = bias

    arguments = {"dtype": "bfloat16", "max_logprobs": -1}
    with engine(damaged(mixtures["gptq"], add_biases, "", tmp_path), **arguments) as llm:
        found = logprobs(llm)
        if RELOADS_GPTQ:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(mixtures["gptq"])})
            llm.reset_prefix_cache()
        reloaded = logprobs(llm)
    with engine(mixtures["plain, int4"], **arguments) as llm:
        without = logprobs(llm)
        llm.apply_model(partial(_add_to_outputs, biases))
        llm.reset_prefix_cache()
        expected = logprobs(llm)
    assert (found - expected).abs().max() < 0.25  # bf16 rounds at other places
    assert size == 0 or (without - expected).abs().max() > 1
    assert (reloaded - (without if RELOADS_GPTQ else expected)).abs().max() < 0.25


def _add_to_outputs(biases: dict[int, torch.Tensor], model: torch.nn.Module) -> None:
    for layer, bias in biases.items():
        model.model.layers[layer].mlp.register_forward_hook(lambda _module, _args, out, bias=bias: out + bias)


def logprobs(llm) -> torch.Tensor:
    """Those of all tokens as the first one of each answer."""
    outputs = generate(llm, PROMPTS, max_tokens=1, logprobs=-1)
    return torch.tensor([
        [one.logprob for _, one in sorted(output.outputs[0].logprobs[0].items())] for output in outputs
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("channelwise", "weight"),
        ("channelwise", "weight_scale"),
        ("static", "input_scale"),
        ("blockwise", "weight"),
        ("blockwise", "weight_scale_inv"),
        ("int8", "weight"),
        ("awq", "qweight"),
        ("awq", "qzeros"),
        ("awq", "scales"),
        ("gptq", "qweight"),
        ("int4, zero points", "weight_zero_point"),
    ],
)
def test_a_missing_tensor_of_an_expert_is_named(name, tensor, mixtures, engine, tmp_path):
    missing = f"model.layers.1.mlp.experts.5.up_proj.{tensor}"
    folder = damaged(mixtures[name], lose, missing, tmp_path)
    named = rf"model\.layers\.1\.mlp\.experts.*\.w13_{tensor} \(w3 of expert 5\) is missing in the checkpoint"
    assert_refused(folder, engine, named)


def test_a_missing_weight_of_an_expert_that_vllm_would_quantise_is_named(mixtures, engine, tmp_path):
    folder = damaged(mixtures["plain"], lose, "model.layers.1.mlp.experts.5.up_proj.weight", tmp_path)
    named = r"model\.layers\.1\.mlp\.experts.*\.w13_weight \(w3 of expert 5\) is missing in the checkpoint"
    assert_refused(folder, engine, named, quantization="fp8")


def _half_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[: len(tensor) // 2]


def _half_columns(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:, : tensor.shape[1] // 2]


def _scalar(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten()[0]


def _longer(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor] * 3)


@pytest.mark.parametrize(
    ("name", "tensor", "resize"),
    [
        ("channelwise", "weight", _half_rows),
        ("channelwise", "weight_scale", _scalar),
        ("channelwise", "weight_scale", _longer),
        ("blockwise", "weight", _half_columns),
        ("blockwise", "weight_scale_inv", _longer),
        ("static", "weight", _half_columns),
        ("int8", "weight", _half_rows),
        ("int8", "weight", _longer),
        ("awq", "qweight", _half_columns),
        ("awq", "qzeros", _half_rows),
        ("awq", "qzeros", _longer),
        ("gptq", "qweight", _half_rows),
        ("gptq", "scales", _longer),
        ("int4", "weight_scale", _scalar),
        ("int4, zero points", "weight_packed", _half_rows),
        ("int4, zero points", "weight_scale", _longer),
        ("int4, zero points", "weight_zero_point", _half_columns),
    ],
)
def test_a_tensor_of_another_size_of_an_expert_is_named(name, tensor, resize, mixtures, engine, tmp_path):
    def change(weights: dict[str, torch.Tensor], name: str) -> None:
        weights[name] = resize(weights[name]).contiguous()

    folder = damaged(mixtures[name], change, f"model.layers.1.mlp.experts.5.down_proj.{tensor}", tmp_path)
    named = rf"model\.layers\.1\.mlp\.experts.*\.w2_{tensor} \(w2 of expert 5\) cannot be loaded: "
    assert_refused(folder, engine, named)


def test_experts_of_another_size_than_the_model_says_are_named(mixtures, engine, tmp_path):
    """The one scale of a weight fits any size."""
    folder = damaged(mixtures["static"], lambda weights, name: None, "", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": 256}))
    said = r"\(w2 of expert 0\) cannot be loaded: \[128, 128\] .*config\.json asks for \[128, 256\]"
    assert_refused(folder, engine, rf"\.w2_weight {said}")


def test_fp8_blocks_that_end_inside_an_expert_are_refused_before_weights_are_loaded(engine, tmp_path):
    quantised.save_plain(tmp_path, quantised.FP8, "qwen3_moe", moe_intermediate_size=192)
    quantised.save_blockwise(tmp_path, tmp_path)
    quantised.save_file({}, tmp_path / "model.safetensors", {"format": "pt"})
    columns = r"192 columns in model\.layers\.0\.mlp\.experts.*, which are no multiple of 128: choose another"
    assert_refused(tmp_path, engine, rf"fp8 experts by blocks of 128 x 128 with {columns}")


@pytest.mark.parametrize("name", ["plain", "blockwise", "awq"])
def test_experts_that_are_not_served_are_refused_before_weights_are_loaded(
    name, mixtures, engine, tmp_path, monkeypatch
):
    monkeypatch.setattr(experts, "SCORING_FUNCS", ("sigmoid",))  # as if the contract had no others
    folder = damaged(mixtures[name], lambda weights, _: weights.clear(), "", tmp_path)
    said = r"does not support the scores softmax in model\.layers\.0\.mlp\.experts.*: choose another model"
    assert_refused(folder, engine, said)
