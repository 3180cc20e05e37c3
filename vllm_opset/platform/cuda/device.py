"""Checks for a usable NVIDIA GPU. A message says why none is usable, and after a colon the cure. Needs no vLLM."""

import contextlib
import os
from collections.abc import Iterator

import torch

from vllm_opset.kernels import triton

VISIBLE = "CUDA_VISIBLE_DEVICES"
OLDEST = (8, 0)  # compute capability: older GPUs lack bfloat16, and Triton's kernels are not tuned for them
NEEDED = f"a GPU of compute capability {OLDEST[0]}.{OLDEST[1]} or newer"


def missing(elsewhere: bool = False) -> str | None:
    """What is missing, or None. It does not initialise CUDA, because vLLM could not fork its processes after that.

    elsewhere: whether other processes have GPUs, so that this one needs none.
    """
    if torch.version.cuda is None:
        return "this PyTorch was built without CUDA: pip install one of its builds for CUDA"
    if not elsewhere and torch.cuda.device_count() == 0:
        return _why_none_is_found()
    return triton.unavailable()


def too_old(device: torch.device | int = 0) -> str | None:
    """Why this GPU cannot be used, or None. It initialises CUDA."""
    capability = torch.cuda.get_device_capability(device)
    if capability >= OLDEST:
        return None
    return (
        f"vllm-opset needs {NEEDED}, and {torch.cuda.get_device_name(device)} has "
        f"{capability[0]}.{capability[1]}: use another one, or set OPSET_PLATFORM=cpu"
    )


@contextlib.contextmanager
def named_out_of_memory() -> Iterator[None]:
    """Within this context, an engine that runs out of memory at its start names the settings to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RuntimeError(
            "the GPU's memory is not enough to start: lower --max-num-batched-tokens and --max-num-seqs, for what"
            " a step needs beside weights and KV cache, or --gpu-memory-utilization, for the KV cache. "
            + str(error).splitlines()[0]
        ) from error


def _why_none_is_found() -> str:
    visible = os.environ.get(VISIBLE)
    if visible is not None and visible.strip() in ("", "-1"):
        return (
            f"{VISIBLE}={visible!r} hides every NVIDIA GPU, as Ray does from an actor that asked for none: unset it, "
            "name a GPU, or give the actor one"
        )
    named = "" if visible is None else f"; {VISIBLE}={visible!r}"
    return (
        f"PyTorch finds no NVIDIA GPU ({_what_cuda_says()}{named}): see that nvidia-smi lists one, that its driver is "
        f"new enough for CUDA {torch.version.cuda}, and that {VISIBLE} names it or is unset"
    )


def _what_cuda_says() -> str:
    """The first sentence of CUDA's error at initialisation. Without a GPU, initialising does no harm."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0].partition(". ")[0].rstrip(".")
    return "its driver names none"
