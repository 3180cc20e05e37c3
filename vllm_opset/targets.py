"""The target of a kernel: vendor, architecture and features of the device that it is chosen for.

The machine is asked here and nowhere below. A `Problem` carries the target of its device type, launch tables are keyed
by it, and `instead` puts another one in its place, to compile for a GPU that is not there.
"""

import functools
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

FP8 = "fp8"  # converts to and from e4m3
PDL = "pdl"  # programmatic dependent launch
WGMMA = "wgmma"  # Hopper's matrix instructions and copy engine


@dataclass(frozen=True)
class Target:
    """vendor: "nvidia", "amd", "huawei", or "cpu". architecture: such as "sm90", "gfx942", or the processor's."""

    vendor: str
    architecture: str

    def __str__(self) -> str:
        return f"{self.vendor}/{self.architecture}"

    @property
    def generation(self) -> int:
        """A number that rises with a vendor's GPUs; 0 for other devices. AMD's are hexadecimal."""
        if self.vendor == "nvidia":
            return int(self.architecture.removeprefix("sm"))
        return int(self.architecture.removeprefix("gfx"), 16) if self.vendor == "amd" else 0

    @property
    def features(self) -> frozenset[str]:
        """Features on which kernels and launches depend."""
        return frozenset(feature for feature, has in _FEATURES.items() if has(self))


_FEATURES = {
    FP8: lambda target: target.generation >= {"nvidia": 89, "amd": 0x950}.get(target.vendor, 0),
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


@functools.cache
def _found(device_type: str) -> Target:
    if device_type == "cuda" and torch.cuda.is_available():
        if torch.version.hip:
            return Target("amd", torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0])
        return Target("nvidia", "sm{}{}".format(*torch.cuda.get_device_capability()))
    if device_type == "cuda":
        return Target("nvidia", "sm90")  # absent: `doctor` and tests ask what would be chosen on a Hopper GPU
    return Target("huawei", "npu") if device_type == "npu" else Target("cpu", platform.machine())
