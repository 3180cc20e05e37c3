"""The cores and memory that this process may use, within its CPU affinity and control groups, and its processor.

The processor is described by its name and its vector instructions.
"""

import os
import platform
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
GROUPS_OF_PROCESS = Path("/proc/self/cgroup")
CPUS = Path("/sys/devices/system/cpu")
CPUINFO = Path("/proc/cpuinfo")
# The vector and matrix instructions of a processor, by the flag that Linux lists for them. The best come first.
VECTORS = {
    "amx_bf16": "AMX",
    "avx512_fp16": "AVX-512 with bf16 and fp16",
    "avx512_bf16": "AVX-512 with bf16",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
}
# Additions of vendors to a processor's name: trademarks, and the nominal clock, which is not the clock in use.
NOT_THE_NAME = re.compile(r"\((R|TM|r|tm)\)|( CPU)? @ .*")


@dataclass(frozen=True)
class Memory:
    """Sizes in bytes. total: the limit for the process and its neighbours together. available: unused memory."""

    total: int
    available: int


@dataclass(frozen=True)
class Processor:
    """name: without trademarks and clock. flags: as in /proc/cpuinfo; empty where Linux lists no x86 flags."""

    name: str
    flags: frozenset[str]

    @property
    def vectors(self) -> str:
        """The best of VECTORS that the processor has."""
        return next((name for flag, name in VECTORS.items() if flag in self.flags), "no AVX2")


def processor() -> Processor:
    """The first processor of the machine."""
    pairs = (line.partition(":") for line in reversed(CPUINFO.read_text().splitlines()))
    first = {name.strip(): value.strip() for name, _, value in pairs}
    name = NOT_THE_NAME.sub("", first.get("model name", platform.machine()))
    return Processor(" ".join(name.split()), frozenset(first.get("flags", "").split()))


def memory() -> Memory:
    """The machine's memory, or the lowest limit of a control group if that is lower."""
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    for group in _groups("memory"):
        limit = _number(group / "memory.max") or _number(group / "memory.limit_in_bytes")
        if limit is not None and limit < machine.total:
            used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes") or 0
            total, available = min(total, limit), min(available, limit - used + _file_cache(group))
    return Memory(total, available)


def physical_cores() -> int:
    """Cores that the process may use, within the quotas of its control groups. Hyper-threads of one core count once."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    quotas = (quota for group in _groups("cpu") if (quota := _cpu_quota(group)) is not None)
    return max(1, int(min([cores_of(cpus), *quotas])))


def cores_of(cpus: Iterable[int]) -> int:
    """The number of cores of these CPUs. Hyper-threads of one core count once."""
    return len({_text(CPUS / f"cpu{cpu}/topology/thread_siblings_list").strip() or str(cpu) for cpu in cpus})


def _groups(controller: str) -> Iterator[Path]:
    """The folders of the control groups that may limit this process: its own, and those around it.

    In a container the root may be its own group, and the path that Linux gives may lie outside of what it sees.
    """
    yield from (CGROUP, CGROUP / controller)  # The first version has a tree for each controller.
    for line in _text(GROUPS_OF_PROCESS).splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUP / controller if controllers else CGROUP
        own = root / path.lstrip("/")
        yield from (group for group in (own, *own.parents) if group.is_relative_to(root))


def _cpu_quota(group: Path) -> float | None:
    """The control group's share of CPU time, in cores; None without a limit."""
    if words := _text(group / "cpu.max").split():
        quota, period = words
        return None if quota == "max" else int(quota) / int(period)
    quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    return quota / period if quota and quota > 0 and period else None


def _file_cache(group: Path) -> int:
    """Bytes of the control group's usage that the kernel frees when they are needed."""
    fields = dict(line.split() for line in _text(group / "memory.stat").splitlines())
    # Files that were read twice are active. In the first version, only the totals include the groups within.
    kinds = "active_file", "inactive_file"
    return sum(int(fields.get(f"total_{kind}") or fields.get(kind, 0)) for kind in kinds)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return None if text in ("", "max") else int(text)


def _text(path: Path) -> str:
    """What a file of the system says. Nothing if it does not exist, or may not be read."""
    try:
        return path.read_text(errors="surrogateescape")
    except OSError:
        return ""
