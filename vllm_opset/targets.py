"""The target of a kernel: vendor, architecture and features of the device that it is chosen for.

The machine is asked here and nowhere below. A `Problem` carries the target of its device type, launch tables are keyed
by it, and `instead` puts another one in its place, to compile for a GPU that is not there. Features of GPUs follow from
vendor and architecture. Features of CPUs and NPUs are what PyTorch's libraries offer on this machine.
"""

import functools
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

FP8 = "fp8"  # converts to and from e4m3
INT8 = "int8"  # multiplies matrices of it
PDL = "pdl"  # programmatic dependent launch
WGMMA = "wgmma"  # Hopper's matrix instructions and copy engine
AMX = "amx"  # Intel's matrix instructions, in which oneDNN multiplies bf16
# The dtypes in which oneDNN multiplies matrices on the processor. Without fp32, PyTorch has no oneDNN.
ONEDNN = {torch.float32: "onednn_fp32", torch.bfloat16: "onednn_bf16", torch.float16: "onednn_fp16"}
# The families of Ascend NPUs by the prefixes of their names. The older 910 has none: its name stays as it is.
SOC_NAMES = {"Ascend910B": "A2", "Ascend910_93": "A3", "Ascend950": "A5", "Ascend310P": "310P"}

Value = TypeVar("Value")


@dataclass(frozen=True)
class Target:
    """The kind of a device.

    vendor: "nvidia", "amd", "huawei", or "cpu". architecture: such as "sm90", "gfx942", "A2", or the processor's.

    features: those on which kernels and launches depend. By default, those that follow from vendor and architecture. An
    NPU's are the operators that torch_npu registers, such as "npu::npu_swiglu", and INT8.
    """

    vendor: str
    architecture: str
    features: frozenset[str] = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.features is None:
            object.__setattr__(self, "features", frozenset(name for name, has in _FEATURES.items() if has(self)))

    def __str__(self) -> str:
        return f"{self.vendor}/{self.architecture}"

    @property
    def generation(self) -> int:
        """A number that rises with a vendor's GPUs; 0 for other devices. AMD's are hexadecimal."""
        if self.vendor == "nvidia":
            return int(self.architecture.removeprefix("sm"))
        return int(self.architecture.removeprefix("gfx"), 16) if self.vendor == "amd" else 0

    @property
    def warp_size(self) -> int:
        """The threads of a GPU's warp. AMD's for data centres, gfx9, have 64."""
        return 64 if self.vendor == "amd" and self.architecture.startswith("gfx9") else 32


def _converts_fp8(vendor: str, generation: int) -> bool:
    if vendor == "amd":  # generations between these two are RDNA's before its fourth
        return generation == 0x950 or generation >= 0x1200
    return vendor == "nvidia" and generation >= 89


_FEATURES = {
    FP8: lambda target: _converts_fp8(target.vendor, target.generation),
    INT8: lambda target: target.vendor in ("nvidia", "amd"),
    PDL: lambda target: target.vendor == "nvidia" and target.generation >= 90,
    WGMMA: lambda target: target.vendor == "nvidia" and target.generation == 90,
}
_instead: list[Target] = []


def of(device_type: str) -> Target:
    """The target of this machine's first device of a type. All devices of a type are taken to be alike."""
    return _instead[-1] if _instead else _found(device_type)


@contextmanager
def instead(target: Target) -> Iterator[None]:
    """Within it, every device has this target."""
    _instead.append(target)
    try:
        yield
    finally:
        _instead.pop()


def nearest(target: Target, table: Mapping[str, Value]) -> Value:
    """The value for a target in a table by name: its own, that of the vendor's nearest older one, or else the first."""
    known = [Target(*name.split("/")) for name in table]
    not_newer = [one for one in known if one.vendor == target.vendor and one.generation <= target.generation]
    return table[str(max(not_newer, key=lambda one: one.generation) if not_newer else known[0])]


def soc(name: str) -> str:
    """A2, A3, A5 or 310P, from the name of an NPU. An unknown name is returned as it is."""
    return next((known for prefix, known in SOC_NAMES.items() if name.startswith(prefix)), name)


@functools.cache
def _found(device_type: str) -> Target:
    if device_type == "cuda" and torch.cuda.is_available():
        if torch.version.hip:
            return Target("amd", torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0])
        return Target("nvidia", "sm{}{}".format(*torch.cuda.get_device_capability()))
    if device_type == "cuda":
        return Target("nvidia", "sm90")  # absent: `doctor` and tests ask what would be chosen on a Hopper GPU
    if device_type == "npu" and hasattr(torch, "npu") and torch.npu.is_available():
        return Target("huawei", soc(torch.npu.get_device_name()), npu_features())
    if device_type == "npu":
        return Target("huawei", "npu")  # absent
    return Target("cpu", platform.machine(), _onednn_features())


def npu_features() -> frozenset[str]:
    """The operators of torch_npu and of ATB that are registered, such as "npu::npu_swiglu", and INT8 by one of them."""
    names = torch._C._dispatch_get_all_op_names()
    operators = frozenset(name.partition(".")[0] for name in names if name.startswith(("npu::", "atb::")))
    return operators | ({INT8} if "npu::npu_quant_matmul" in operators else set())


def _onednn_features() -> frozenset[str]:
    if not torch.backends.mkldnn.is_available():
        return frozenset()
    onednn = torch.ops.mkldnn
    halves = {torch.bfloat16: onednn._is_mkldnn_bf16_supported, torch.float16: onednn._is_mkldnn_fp16_supported}
    dtypes = {ONEDNN[dtype] for dtype in (torch.float32, *(half for half, has in halves.items() if has()))}
    multiplies_tiles = ONEDNN[torch.bfloat16] in dtypes and torch.cpu._is_amx_tile_supported()
    return frozenset(dtypes | ({AMX} if multiplies_tiles else set()))
