"""Checkpoints of a model in quantised formats, damaged ones, and the answers of engines that serve them."""

import shutil
from pathlib import Path

import models
import pytest
import quantised
import rounding
import torch
from engines import generate, runner, served, tokens

from vllm_opset import selection, targets
from vllm_opset.model.layers import OpsetLayer
from vllm_opset.ops.schemes import GroupShape

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
NOT_ON_GPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU quantises activations, which other tests here check: runs without one"
)
PER_TOKEN, PER_GROUP = GroupShape(1, -1), GroupShape(1, 128)
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


# The checkpoint of the weights that a format stands for; `plain` for all others.
PLAIN = {"int8": "plain, int8", "static, int8": "plain, int8", **dict.fromkeys(INT4, "plain, int4")}


def answers(llm) -> list[list[int]]:
    return tokens(generate(llm, PROMPTS, max_tokens=NUM_TOKENS))


def assert_rounding_alone(name: str, folders: dict[str, Path], answered: list[tuple[list[int], torch.Tensor]]) -> None:
    """transformers gives the answers to PROMPTS the same log-probabilities, but for the rounding of this format."""
    reference = rounding.loaded(folders[PLAIN.get(name, "plain")])
    rounding.assert_alone(reference, PROMPTS, answered, rounding.INPUTS.get(name))


def answers_of_plain(folders: dict[str, Path], engine) -> dict[str, list[list[int]]]:
    """The tokens of the weights that each dtype's checkpoints stand for."""

    def of(name: str) -> list[list[int]]:
        with engine(folders[name], dtype="bfloat16") as llm:
            return answers(llm)

    return {"float8_e4m3fn": of("plain"), "int8": of("plain, int8"), "uint4": of("plain, int4")}


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


def lose(weights: dict[str, torch.Tensor], name: str) -> None:
    """Delete a tensor, or all tensors of a layer."""
    for one in [one for one in weights if f"{one}.".startswith(f"{name}.")]:
        del weights[one]


def damaged(checkpoint: Path, damage, name: str, folder: Path) -> Path:
    """A copy of a checkpoint in which a tensor is damaged."""
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    weights = quantised.load_file(folder / "model.safetensors")
    damage(weights, name)
    quantised.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def assert_refused(folder: Path, engine, named: str, **arguments) -> None:
    """No engine starts with this checkpoint, and the error says what is wrong with it."""
    with pytest.raises(Exception, match=named), engine(folder, dtype="bfloat16", **arguments):
        pass
