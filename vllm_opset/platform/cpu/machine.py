"""The cores and memory that this process may use, within its CPU affinity and control group, and its processor.

The processor is described by its name and its vector instructions.
"""

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
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
    """The machine's memory, or the control group's limit if that is lower."""
    machine = psutil.virtual_memory()
    limit = _number(CGROUP / "memory.max") or _number(CGROUP / "memory/memory.limit_in_bytes")
    if limit is None or limit >= machine.total:
        return Memory(machine.total, machine.available)
    used = _number(CGROUP / "memory.current") or _number(CGROUP / "memory/memory.usage_in_bytes") or 0
    return Memory(limit, min(machine.available, limit - used + _file_cache()))


def physical_cores() -> int:
    """Cores that the process may use, within the control group's quota. Hyper-threads of one core count once."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = len({_siblings(cpu) for cpu in cpus})
    quota = _cpu_quota()
    return max(1, cores if quota is None else min(cores, int(quota)))


def _siblings(cpu: int) -> str:
    path = CPUS / f"cpu{cpu}/topology/thread_siblings_list"
    return path.read_text().strip() if path.exists() else str(cpu)


def _cpu_quota() -> float | None:
    """The control group's share of CPU time, in cores; None without a limit."""
    path = CGROUP / "cpu.max"
    if path.exists():
        quota, period = path.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    quota, period = _number(CGROUP / "cpu/cpu.cfs_quota_us"), _number(CGROUP / "cpu/cpu.cfs_period_us")
    return quota / period if quota and quota > 0 and period else None


def _file_cache() -> int:
    """Bytes of the control group's usage that the kernel frees when they are needed."""
    stat = next((path for path in (CGROUP / "memory.stat", CGROUP / "memory/memory.stat") if path.exists()), None)
    if stat is None:
        return 0
    fields = dict(line.split() for line in stat.read_text().splitlines())
    return int(fields.get("inactive_file", 0))


def _number(path: Path) -> int | None:
    text = path.read_text().strip() if path.exists() else "max"
    return None if text == "max" else int(text)
