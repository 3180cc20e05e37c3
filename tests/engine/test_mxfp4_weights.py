"""gpt-oss with MXFP4 experts gives transformers' tokens for the weights that they stand for."""

import shutil
from pathlib import Path

import models
import mxfp4
import pytest
import torch
from engines import generate, report, tokens
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

pytestmark = [pytest.mark.engine, pytest.mark.window]
PROMPTS = models.prompts((1, 7, 16, 40, 77))
NUM_TOKENS = 48
# A GPU multiplies MXFP4 by bf16 alone.
DTYPE = "bfloat16" if torch.cuda.is_available() else "float32"
# The mean error of log-probabilities in bf16: twice the error on a CPU.
MEAN_ERROR = 0.075
LAYER = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("packed")
    return folder, mxfp4.build(folder)


def test_packed_weights_give_the_tokens_of_transformers(checkpoint, engine):
    folder, reference = checkpoint
    expected = [models.generate(reference, prompt, NUM_TOKENS)[0] for prompt in PROMPTS]
    with engine(folder, dtype=DTYPE, max_num_batched_tokens=64) as llm:
        assert_right(llm, reference, expected)
        (row,) = (row for row in report(llm) if row["op"] == "fused_experts")
        assert row["calls"] and row["kernel"] != "reference"
        assert "float4_e2m1fn_x2 1x32 by activations as they are" in row["problem"]
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        llm.reset_prefix_cache()
        assert_right(llm, reference, expected)


def assert_right(llm, reference: PreTrainedModel, expected: list[list[int]]) -> None:
    outputs = generate(llm, PROMPTS, max_tokens=NUM_TOKENS, logprobs=0)
    if torch.cuda.is_available():
        assert models.mean_error(reference, PROMPTS, outputs) < MEAN_ERROR
    else:
        assert tokens(outputs) == expected


@pytest.mark.parametrize(
    ("damage", "tensor"),
    [(lambda scales: scales[3].fill_(255), "gate_up_proj_scales"), (None, "down_proj_scales")],
    ids=["NaN", "missing"],
)
def test_a_damaged_scale_is_named(damage, tensor, checkpoint, engine, tmp_path):
    shutil.copytree(checkpoint[0], tmp_path, dirs_exist_ok=True)
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
