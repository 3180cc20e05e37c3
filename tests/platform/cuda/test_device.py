"""A GPU that is missing or unusable is named in one line, with the cure."""

import pytest
import torch

from vllm_opset.platform.cuda import device


@pytest.fixture
def found(monkeypatch):
    """`found(cuda="13.0", gpus=1, triton=True)`: the devices and packages that PyTorch and Python find."""

    def found(cuda: str | None = "13.0", gpus: int = 1, triton: bool = True, capability=(9, 0)) -> None:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
        if not triton:
            monkeypatch.setattr(device.triton.importlib.util, "find_spec", lambda name: None)

    return found


def test_what_there_is_has_no_fault(found):
    found()
    assert device.missing() is None and device.too_old() is None


@pytest.mark.parametrize(
    ("lacking", "fault"),
    [
        ({"cuda": None}, "this PyTorch was built without CUDA: pip install one of its builds for CUDA"),
        ({"triton": False}, "Triton is not installed: pip install triton"),
    ],
)
def test_what_is_missing(lacking, fault, found):
    found(**lacking)
    assert device.missing() == fault


def test_no_gpu_is_said_with_what_cuda_says(found, monkeypatch):
    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nUpdate it.")

    found(gpus=0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "init", init)
    assert device.missing().startswith(
        "PyTorch finds no NVIDIA GPU (The NVIDIA driver on your system is too old (found version 11040)): see"
    )


def test_a_gpu_that_is_too_old(found):
    found(capability=(7, 5))
    assert device.too_old() == (
        "vllm-opset needs a GPU of compute capability 8.0 or newer, and Some GPU has 7.5: use another one, or set "
        "OPSET_PLATFORM=cpu"
    )


def test_out_of_memory_names_the_settings():
    with (
        pytest.raises(RuntimeError, match=r"lower --max-num-batched-tokens .* Tried to allocate 2 GiB"),
        device.named_out_of_memory(),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee elsewhere.")
