"""Quantised experts by the part moe on stock vLLM answer as those of an engine without vLLM's kernels do."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import mxfp4
import pytest
import quantised
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("vllm._C_stable_libtorch") is None,
    reason="needs an NVIDIA GPU and stock vLLM: runs on one",
)

# vLLM's own kernels serve the linear layers.
ON_STOCK = {
    "OPSET_PLATFORM": "native",
    "OPSET_NATIVE": "attention=on,sampler=off,linear=off,ops=off,moe=on",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it may not be installed
}
WITHOUT_KERNELS = {"OPSET_PLATFORM": "cuda"}
# Linear layers round differently, and with random weights single log-probabilities then differ by up to 1.2, but this
# share of them by less than ROUNDING. With two experts swapped, or results twice as large, it is 1.4 to 1.7 on a CPU.
SHARE, ROUNDING = 0.9, 0.4


def save_int4(method: str, group: int, zero_points: bool) -> Callable[[Path, Path], None]:
    def save(plain: Path, folder: Path) -> None:
        quantised.save_plain(plain, quantised.INT4, "qwen3_moe")
        quantised.save_int4(plain, folder, method, group, zero_points)

    return save


def save_int8(plain: Path, folder: Path) -> None:
    quantised.save_plain(plain, quantised.INT8, "qwen3_moe")
    quantised.save_compressed(plain, folder, quantised.INT8)


def save_mxfp4(_: Path, folder: Path) -> None:
    mxfp4.build(folder)


# How a checkpoint is saved, and whether its engine compiles and captures graphs.
FORMATS = {
    "AWQ": (save_int4("awq", 32, True), False),
    "GPTQ": (save_int4("gptq", 64, False), False),
    "compressed-tensors in int4": (save_int4("compressed-tensors", 32, False), True),
    "int8": (save_int8, False),
    "MXFP4": (save_mxfp4, True),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> Iterator[dict[tuple[str, str], Future[dict]]]:
    """The answers to each format's checkpoint on stock vLLM and without its kernels. All engines start at once."""
    asked = {}
    with ThreadPoolExecutor(2 * len(FORMATS)) as pool:
        for name, (save, compiles) in FORMATS.items():
            plain, folder = (tmp_path_factory.mktemp(f"{name}, {form}") for form in ("plain", "packed"))
            save(plain, folder)
            for platform in (ON_STOCK, WITHOUT_KERNELS):
                key = name, platform["OPSET_PLATFORM"]
                asked[key] = pool.submit(ask, folder, platform, {"enforce_eager": not compiles})
        yield asked


def ask(folder: Path, platform: dict[str, str], arguments: dict) -> dict:
    script = Path(__file__).with_name("answering.py")
    process = subprocess.run(
        [sys.executable, script, folder, json.dumps(arguments)],
        env=os.environ | platform,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, f"{folder.name}, {platform}: {process.stderr[-5000:]}"
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", FORMATS)
def test_experts_answer_as_without_vllms_kernels(name, answers):
    found, expected = answers[name, "native"].result(), answers[name, "cuda"].result()
    assert found["kernels"] == expected["kernels"] == ["triton"]
    differences = []
    for mine, theirs in zip(found["answers"], expected["answers"], strict=True):
        pairs = list(zip(mine["tokens"], theirs["tokens"], strict=True))
        # After the first token that differs, the engines answer different texts.
        same = next((step for step, (one, other) in enumerate(pairs) if one != other), len(pairs) - 1)
        for own, right in zip(mine["logprobs"][: same + 1], theirs["logprobs"][: same + 1], strict=True):
            common = own.keys() & right.keys()
            assert common
            differences += [abs(own[token] - right[token]) for token in common]
    assert sum(one < ROUNDING for one in differences) > SHARE * len(differences)  # NaN is not near
