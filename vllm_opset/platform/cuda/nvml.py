"""Facts about a GPU from NVML, the library behind nvidia-smi.

They are read without initialising CUDA. Once CUDA is initialised, vLLM cannot fork its processes, and each of them has
to import everything again.
"""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from vllm.utils.import_utils import import_pynvml

from vllm_opset.targets import Target

pynvml = import_pynvml()


class Gpu(NamedTuple):
    """The name, memory and target of a GPU. total_memory: in bytes."""

    name: str
    total_memory: int
    target: Target


def gpu(device_id: int) -> Gpu | None:
    """The GPU of that number among the visible ones. None if there is none, or NVML does not know it or is missing.

    NVML numbers GPUs by PCI bus. CUDA does so too under CUDA_DEVICE_ORDER=PCI_BUS_ID, or if all GPUs are of one kind.
    """
    names = list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
    if not names:
        return _named(str(device_id))
    return _named(names[device_id]) if device_id < len(names) else None


@functools.cache
def _named(name: str) -> Gpu | None:
    try:
        with _handle(name) as handle:
            target = Target("nvidia", "sm{}{}".format(*pynvml.nvmlDeviceGetCudaComputeCapability(handle)))
            return Gpu(pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetMemoryInfo(handle).total, target)
    except pynvml.NVMLError:
        return None


def physical_id(name: str) -> int:
    """The number of a GPU that CUDA_VISIBLE_DEVICES names by number or UUID. Raises NVMLError if NVML lacks it."""
    if name.strip().isdigit():
        return int(name)
    with _handle(name) as handle:
        return pynvml.nvmlDeviceGetIndex(handle)


@contextmanager
def _handle(name: str) -> Iterator:
    pynvml.nvmlInit()
    try:
        name = name.strip()
        by_number = name.isdigit()
        yield pynvml.nvmlDeviceGetHandleByIndex(int(name)) if by_number else pynvml.nvmlDeviceGetHandleByUUID(name)
    finally:
        pynvml.nvmlShutdown()
