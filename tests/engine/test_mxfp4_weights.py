"""gpt-oss with MXFP4 experts gives the tokens of the same weights without quantisation."""

import shutil

import models
import mxfp4
import pytest
import torch
from engines import generate, report, tokens
from safetensors.torch import load_file, save_file

pytestmark = [pytest.mark.engine, pytest.mark.window]
PROMPTS = models.prompts((1, 7, 40, 77))
NUM_TOKENS = 48
LAYER = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict:
    folders = {name: tmp_path_factory.mktemp(name) for name in ("plain", "packed")}
    mxfp4.save(folders["plain"], folders["packed"])
    return folders


def test_packed_weights_serve_as_what_they_stand_for(checkpoints, engine):
    # A GPU multiplies MXFP4 by bf16 alone.
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    with engine(checkpoints["plain"], dtype=dtype) as llm:
        expected = tokens(generate(llm, PROMPTS, max_tokens=NUM_TOKENS))
    with engine(checkpoints["packed"], dtype=dtype, max_num_batched_tokens=64) as llm:
        assert tokens(generate(llm, PROMPTS, max_tokens=NUM_TOKENS)) == expected
        (row,) = (row for row in report(llm) if row["op"] == "fused_experts")
        assert row["calls"] and row["kernel"] != "reference"
        assert "float4_e2m1fn_x2 1x32 by activations as they are" in row["problem"]
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoints["packed"])})
        llm.reset_prefix_cache()
        assert tokens(generate(llm, PROMPTS, max_tokens=NUM_TOKENS)) == expected


@pytest.mark.parametrize(
    ("damage", "tensor"),
    [(lambda scales: scales[3].fill_(255), "gate_up_proj_scales"), (None, "down_proj_scales")],
    ids=["NaN", "missing"],
)
def test_a_damaged_scale_is_named(damage, tensor, checkpoints, engine, tmp_path):
    shutil.copytree(checkpoints["packed"], tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    scales = weights.pop(f"{LAYER}.{tensor}")
    if damage is not None:
        damage(scales)
        weights[f"{LAYER}.{tensor}"] = scales
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    expert = 0 if damage is None else 3
    named = rf"model\.layers\.1\.mlp\.experts.* \({tensor} in the checkpoint\) holds NaN.* for expert {expert}"
    with pytest.raises(Exception, match=named), engine(tmp_path):
        pass
