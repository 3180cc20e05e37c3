"""Models with fp8 weights give the tokens of the same weights in bf16, whatever the format of their scales."""

import shutil

import models
import pytest
import quantised
import torch
from engines import generate, report, runner, tokens

from vllm_opset import ops, targets
from vllm_opset.ops.schemes import GroupShape, dequantise

pytestmark = [pytest.mark.engine, pytest.mark.window]
PER_TOKEN, PER_GROUP = GroupShape(1, -1), GroupShape(1, 128)
PROMPTS = models.prompts((1, 7, 40))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict:
    folders = {name: tmp_path_factory.mktemp(name) for name in ("plain", "channelwise", "blockwise")}
    quantised.save_plain(folders["plain"])
    quantised.save_channelwise(folders["plain"], folders["channelwise"])
    quantised.save_blockwise(folders["plain"], folders["blockwise"])
    return folders


@pytest.fixture(scope="module")
def expected(checkpoints, engine) -> list[list[int]]:
    with engine(checkpoints["plain"], dtype="bfloat16") as llm:
        return tokens(generate(llm, PROMPTS))


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU quantises activations, and the next test checks that: runs without one"
)
@pytest.mark.parametrize(
    ("name", "arguments", "group"),
    [
        ("plain", {"quantization": "fp8"}, "per tensor"),
        ("channelwise", {}, "per row"),
        ("blockwise", {}, "128x128"),
    ],
)
def test_fp8_weights_serve_as_what_they_stand_for(name, arguments, group, checkpoints, expected, engine):
    with engine(checkpoints[name], dtype="bfloat16", **arguments) as llm:
        assert tokens(generate(llm, PROMPTS)) == expected
        rows = [row for row in report(llm) if row["op"] == "linear"]
        assert {row["kernel"] for row in rows if "float8" in row["problem"]} == {"cpu"}
        schemes = {row["problem"].partition("scheme=")[2] for row in rows if row["calls"]}
        assert schemes == {"none", f"float8_e4m3fn {group} by activations as they are"}  # the head is not quantised
        with pytest.raises(Exception, match="packed this model's weights"):
            llm.collective_rpc("save_sharded_state", kwargs={"path": "unused"})
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoints[name])})
        llm.reset_prefix_cache()
        assert tokens(generate(llm, PROMPTS)) == expected


@pytest.mark.parametrize(
    ("name", "group", "scale_name"),
    [("channelwise", PER_TOKEN, "weight_scale"), ("blockwise", PER_GROUP, "weight_scale_inv")],
)
def test_activations_are_in_fp8_where_the_device_multiplies_in_it(
    name, group, scale_name, checkpoints, engine, monkeypatch
):
    if not torch.cuda.is_available():
        cpu = targets.of("cpu")
        like_a_gpu = targets.Target(cpu.vendor, cpu.architecture, cpu.features | {targets.FP8})
        monkeypatch.setattr(targets, "_found", lambda device_type: like_a_gpu)
    layer = "model.layers.1.mlp.down_proj"
    stored = quantised.load_file(checkpoints[name] / "model.safetensors")
    weight = dequantise(stored[f"{layer}.weight"], stored[f"{layer}.{scale_name}"], torch.float32)
    x = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(2)).bfloat16()
    expected = dequantise(*ops.quantise(x, quantised.FP8, list(group)), torch.float32) @ weight.T
    with engine(checkpoints[name], dtype="bfloat16") as llm:
        generate(llm, PROMPTS)
        served = runner(llm).model.get_submodule(layer)
        found = served.quant_method.apply(served, x.to(served.weight.device)).cpu()
        schemes = {row["problem"].partition("scheme=")[2] for row in report(llm) if row["op"] == "linear"}
    assert any(scheme.endswith(f"by float8_e4m3fn {group}") for scheme in schemes)
    # Rounding to bf16 gives 2**-9, and activations that are not quantised would give 2**-5.
    assert (found.float() - expected).norm() < 2**-7 * expected.norm()


@pytest.mark.parametrize(
    "damage",
    [lambda weights, name: weights[name].fill_(float("nan")), lambda weights, name: weights.pop(name)],
    ids=["NaN", "missing"],
)
def test_a_damaged_scale_is_named(damage, checkpoints, engine, tmp_path):
    shutil.copytree(checkpoints["channelwise"], tmp_path, dirs_exist_ok=True)
    weights = quantised.load_file(tmp_path / "model.safetensors")
    damage(weights, "model.layers.1.mlp.down_proj.weight_scale")
    quantised.save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    named = r"model\.layers\.1\.mlp\.down_proj\.weight_scale holds NaN, infinity or a negative number"
    with pytest.raises(Exception, match=named), engine(tmp_path, dtype="bfloat16"):
        pass
