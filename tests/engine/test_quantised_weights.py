"""Models with fp8 weights give the tokens of the same weights in bf16, whatever the format of their scales."""

import shutil

import models
import pytest
import quantised
import torch
from engines import generate, report, tokens

pytestmark = [
    pytest.mark.engine,
    pytest.mark.window,
    pytest.mark.skipif(torch.cuda.is_available(), reason="fp8 weights are refused on a GPU: runs where there is none"),
]
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
