"""gpt-oss with MXFP4 experts gives transformers' tokens for the weights that they stand for."""

import shutil
from contextlib import nullcontext
from pathlib import Path

import models
import mxfp4
import pytest
import torch
from engines import chosen, generate, report, tokens
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from vllm_opset.platform import expert_loading

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
        with pytest.raises(Exception, match="keep the old sinks") if expert_loading.copies_sinks() else nullcontext():
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        llm.reset_prefix_cache()
        assert_right(llm, reference, expected)


def assert_right(llm, reference: PreTrainedModel, expected: list[list[int]]) -> None:
    outputs = generate(llm, PROMPTS, max_tokens=NUM_TOKENS, logprobs=0)
    if torch.cuda.is_available():
        assert models.mean_error(reference, PROMPTS, chosen(outputs)) < MEAN_ERROR
    else:
        assert tokens(outputs) == expected


def damaged(checkpoint: Path, folder: Path, tensor: str, damage) -> Path:
    """A copy of a checkpoint in which `damage` gives one tensor's new value, or None for none."""
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    value = damage(weights.pop(f"{LAYER}.{tensor}"))
    if value is not None:
        weights[f"{LAYER}.{tensor}"] = value.contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def assert_refused(folder: Path, engine, tensor: str, said: str) -> None:
    named = rf"model\.layers\.1\.mlp\.experts.* \({tensor} in the checkpoint\) {said}"
    with pytest.raises(Exception, match=named), engine(folder, dtype=DTYPE):
        pass


def test_a_damaged_scale_is_named(checkpoint, engine, tmp_path):
    def damage(scales: torch.Tensor) -> torch.Tensor:
        scales[3].fill_(255)
        return scales

    folder = damaged(checkpoint[0], tmp_path, "gate_up_proj_scales", damage)
    assert_refused(folder, engine, "gate_up_proj_scales", "holds NaN.* for expert 3")


@pytest.mark.parametrize("kind", ["blocks", "scales", "bias"])
@pytest.mark.parametrize("name", mxfp4.EXPERTS)
def test_a_missing_tensor_is_named(name, kind, checkpoint, engine, tmp_path):
    folder = damaged(checkpoint[0], tmp_path, f"{name}_{kind}", lambda value: None)
    assert_refused(folder, engine, f"{name}_{kind}", "is missing in the checkpoint")


@pytest.mark.parametrize(
    ("tensor", "resize"),
    [
        ("gate_up_proj_blocks", lambda blocks: blocks[:1]),
        ("gate_up_proj_blocks", lambda blocks: blocks.view(8, 64, 6, 16)),
        ("gate_up_proj_scales", lambda scales: scales[:1]),
        ("gate_up_proj_scales", lambda scales: torch.cat([scales] * 2, dim=1)),
        ("gate_up_proj_scales", lambda scales: torch.cat([scales] * 2, dim=2)),
        ("gate_up_proj_bias", lambda bias: bias[:, :1]),
        ("down_proj_blocks", lambda blocks: blocks[:, :48]),
        ("down_proj_scales", lambda scales: scales[:1]),
        ("down_proj_scales", lambda scales: scales[0]),
        ("down_proj_scales", lambda scales: scales[:, :, :0]),
        ("down_proj_bias", lambda bias: bias[:1]),
    ],
)
def test_a_tensor_of_another_size_is_named(tensor, resize, checkpoint, engine, tmp_path):
    folder = damaged(checkpoint[0], tmp_path, tensor, resize)
    assert_refused(folder, engine, tensor, "cannot be loaded: .* in the checkpoint, and config.json asks for")
