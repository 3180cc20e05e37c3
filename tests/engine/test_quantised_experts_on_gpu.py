"""Quantised experts by the part moe on stock vLLM answer as transformers does with the weights that they stand for."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import models
import mxfp4
import pytest
import quantised
import rounding
import torch
from transformers import PreTrainedModel

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("vllm._C_stable_libtorch") is None,
    reason="needs an NVIDIA GPU and stock vLLM: runs on one",
)

# vLLM's own kernels serve the linear layers.
ON_STOCK = {
    "OPSET_PLATFORM": "native",
    "OPSET_NATIVE": "attention=on,sampler=off,linear=off,ops=off,moe=on",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it may not be installed
    "VLLM_USE_DEEP_GEMM": "0",  # it compiles a kernel for each shape
}
Save = Callable[[Path, Path], PreTrainedModel]


def save_int4(method: str, group: int, zero_points: bool) -> Save:
    def save(plain: Path, folder: Path) -> PreTrainedModel:
        quantised.save_plain(plain, quantised.INT4, "qwen3_moe")
        quantised.save_int4(plain, folder, method, group, zero_points)
        return rounding.loaded(plain)

    return save


def save_int8(plain: Path, folder: Path) -> PreTrainedModel:
    quantised.save_plain(plain, quantised.INT8, "qwen3_moe")
    quantised.save_compressed(plain, folder, quantised.INT8)
    return rounding.loaded(plain)


def save_blockwise(plain: Path, folder: Path) -> PreTrainedModel:
    quantised.save_plain(plain, quantised.FP8, "qwen3_moe")
    quantised.save_blockwise(plain, folder)
    return rounding.loaded(plain)


def save_mxfp4(_: Path, folder: Path) -> PreTrainedModel:
    return mxfp4.build(folder)


# How a checkpoint is saved, its name in `rounding.INPUTS`, and whether its engine compiles and captures graphs. In
# fp8, stock vLLM stores only weights by blocks as the part moe reads them, and only on Hopper GPUs.
FORMATS = {
    "AWQ": (save_int4("awq", 32, True), None, False),
    "GPTQ": (save_int4("gptq", 64, False), None, False),
    "compressed-tensors in int4": (save_int4("compressed-tensors", 32, False), None, True),
    "int8": (save_int8, "int8", False),
    "fp8 by blocks": (save_blockwise, "blockwise", False),
    "MXFP4": (save_mxfp4, None, True),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> Iterator[dict[str, tuple[PreTrainedModel, Future[dict]]]]:
    """transformers' model of each format, and the answers of stock vLLM. All engines start at once."""
    asked = {}
    with ThreadPoolExecutor(len(FORMATS)) as pool:
        for name, (save, _, compiles) in FORMATS.items():
            plain, folder = (tmp_path_factory.mktemp(f"{name}, {form}") for form in ("plain", "packed"))
            asked[name] = save(plain, folder), pool.submit(ask, folder, {"enforce_eager": not compiles})
        yield asked


def ask(folder: Path, arguments: dict) -> dict:
    script = Path(__file__).with_name("answering.py")
    process = subprocess.run(
        [sys.executable, script, folder, json.dumps(arguments)],
        env=os.environ | ON_STOCK,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, f"{folder.name}: {process.stderr[-5000:]}"
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", FORMATS)
def test_experts_answer_as_transformers_does(name, answers):
    reference, asked = answers[name]
    found = asked.result()
    assert found["kernels"] == ["triton"]
    answered = [(tokens, torch.tensor(logprobs)) for tokens, logprobs in found["answers"]]
    rounding.assert_alone(reference, models.prompts(), answered, rounding.INPUTS.get(FORMATS[name][1]))
