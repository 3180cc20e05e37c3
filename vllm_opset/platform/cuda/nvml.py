"""What NVML, the library behind nvidia-smi, says of a GPU.

CUDA is not initialised to find out: vLLM could not fork its processes then, and each of them would import everything
again.
"""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from vllm.utils.import_utils import import_pynvml

pynvml = import_pynvml()


class Gpu(NamedTuple):
    """total_memory: in bytes."""

    name: str
    total_memory: int


@functools.cache
def gpu(device_id: int) -> Gpu | None:
    """Of that number among the visible ones. None where NVML does not know it: not all systems have NVML.

    NVML numbers GPUs by PCI bus, as CUDA does under CUDA_DEVICE_ORDER=PCI_BUS_ID, or where all are of one kind.
    """
    names = list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
    try:
        with _handle(names[device_id] if names else str(device_id)) as handle:
            return Gpu(pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError:
        return None


def physical_id(name: str) -> int:
    """Of a GPU as CUDA_VISIBLE_DEVICES names it: by number, or by UUID. Raises NVMLError for one that NVML lacks."""
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
