"""What this process may use of the machine: cores and memory, within its CPU affinity and control group. And what the
processor is called, and can do.
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
# What a processor has for vectors and matrices, by the flag that Linux gives it: the best first.
VECTORS = {
    "amx_bf16": "AMX",
    "avx512_fp16": "AVX-512 with bf16 and fp16",
    "avx512_bf16": "AVX-512 with bf16",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
}
# What vendors add to a name: trademarks, and the clock, which is another one in use.
NOT_THE_NAME = re.compile(r"\((R|TM|r|tm)\)|( CPU)? @ .*")


@dataclass(frozen=True)
class Memory:
    """In bytes. total: what the process and its neighbours may have at most; available: what nobody uses now."""

    total: int
    available: int


@dataclass(frozen=True)
class Processor:
    """name: without trademarks and clock. flags: as in /proc/cpuinfo; none where Linux lists no flags of x86."""

    name: str
    flags: frozenset[str]

    @property
    def vectors(self) -> str:
        """The best of VECTORS that it has."""
        return next((name for flag, name in VECTORS.items() if flag in self.flags), "no AVX2")


def processor() -> Processor:
    """The first one of the machine."""
    pairs = (line.partition(":") for line in reversed(CPUINFO.read_text().splitlines()))
    first = {name.strip(): value.strip() for name, _, value in pairs}
    name = NOT_THE_NAME.sub("", first.get("model name", platform.machine()))
    return Processor(" ".join(name.split()), frozenset(first.get("flags", "").split()))


def memory() -> Memory:
    """The machine's memory, or the control group's share of it where that is less."""
    machine = psutil.virtual_memory()
    limit = _number(CGROUP / "memory.max") or _number(CGROUP / "memory/memory.limit_in_bytes")
    if limit is None or limit >= machine.total:
        return Memory(machine.total, machine.available)
    used = _number(CGROUP / "memory.current") or _number(CGROUP / "memory/memory.usage_in_bytes") or 0
    return Memory(limit, min(machine.available, limit - used + _file_cache()))


def physical_cores() -> int:
    """Cores that the process may run on: hyper-threads of one core count once, a control group's quota is kept."""
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
    """Bytes of the control group's usage that the kernel gives back when they are needed."""
    stat = next((path for path in (CGROUP / "memory.stat", CGROUP / "memory/memory.stat") if path.exists()), None)
    if stat is None:
        return 0
    fields = dict(line.split() for line in stat.read_text().splitlines())
    return int(fields.get("inactive_file", 0))


def _number(path: Path) -> int | None:
    text = path.read_text().strip() if path.exists() else "max"
    return None if text == "max" else int(text)
