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
# A GPU multiplies MXFP4 by bf16 alone.
DTYPE, TIE = ("bfloat16", 0.1) if torch.cuda.is_available() else ("float32", 0)
LAYER = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict:
    folders = {name: tmp_path_factory.mktemp(name) for name in ("plain", "packed")}
    mxfp4.save(folders["plain"], folders["packed"])
    return folders


def test_packed_weights_serve_as_what_they_stand_for(checkpoints, engine):
    with engine(checkpoints["plain"], dtype=DTYPE) as llm:
        expected = generate(llm, PROMPTS, max_tokens=NUM_TOKENS, logprobs=2)
    with engine(checkpoints["packed"], dtype=DTYPE, max_num_batched_tokens=64) as llm:
        assert_same(generate(llm, PROMPTS, max_tokens=NUM_TOKENS), expected)
        (row,) = (row for row in report(llm) if row["op"] == "fused_experts")
        assert row["calls"] and row["kernel"] != "reference"
        assert "float4_e2m1fn_x2 1x32 by activations as they are" in row["problem"]
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoints["packed"])})
        llm.reset_prefix_cache()
        assert_same(generate(llm, PROMPTS, max_tokens=NUM_TOKENS), expected)


def assert_same(outputs, expected) -> None:
    """The same tokens, on a GPU up to the first that nearly ties with the next best: its kernels sum differently."""
    for answer, right, output in zip(tokens(outputs), tokens(expected), expected, strict=True):
        first = next((i for i, pair in enumerate(zip(answer, right, strict=True)) if len(set(pair)) > 1), None)
        if first is not None:
            best = output.outputs[0].logprobs[first]
            assert answer[first] in best and best[right[first]].logprob - best[answer[first]].logprob < TIE


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
    with pytest.raises(Exception, match=named), engine(tmp_path, dtype=DTYPE):
        pass
