"""Cores and memory, as control groups of both kinds give them; and what the KV cache takes of it."""

import os
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from vllm_opset.platform.cpu import kv_memory, machine
from vllm_opset.platform.cpu.machine import Memory

GIB = 2**30


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    """`cgroup({file: text})`: a control group with these files."""
    monkeypatch.setattr(machine, "CGROUP", tmp_path)

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)

    return write


UNLIMITED = [
    {},
    {"memory.max": "max\n", "cpu.max": "max 100000\n"},
    {"memory/memory.limit_in_bytes": str(2**63 - 4096)},
]


@pytest.mark.parametrize("files", UNLIMITED)
def test_without_limits_the_machine_counts(files, cgroup):
    cgroup(files)
    assert machine.memory().total > machine.memory().available > 0
    assert 1 <= machine.physical_cores() <= len(os.sched_getaffinity(0))


def test_memory_of_a_control_group_without_what_the_kernel_gives_back(cgroup):
    cgroup({"memory.max": str(GIB // 2), "memory.current": str(GIB // 4), "memory.stat": f"inactive_file {GIB // 8}\n"})
    assert machine.memory() == Memory(total=GIB // 2, available=GIB // 4 + GIB // 8)


def test_memory_of_a_control_group_of_the_first_kind(cgroup):
    cgroup({"memory/memory.limit_in_bytes": str(GIB // 2), "memory/memory.usage_in_bytes": str(GIB // 4)})
    assert machine.memory() == Memory(total=GIB // 2, available=GIB // 4)


@pytest.mark.parametrize(
    "files", [{"cpu.max": "150000 100000"}, {"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000"}]
)
def test_cores_of_a_quota(files, cgroup, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8), raising=False)
    monkeypatch.setattr(machine, "_siblings", str)
    assert machine.physical_cores() == 8
    cgroup(files)
    assert machine.physical_cores() == 1


def test_threads_of_one_core_count_once(monkeypatch, tmp_path):
    for cpu in range(4):
        folder = tmp_path / f"cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    monkeypatch.setattr(machine, "CPUS", tmp_path)
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    assert machine.physical_cores() == 2


@dataclass
class Spec:
    """A layer's cache that takes so much for one request."""

    size: int

    def max_memory_usage_bytes(self, vllm_config) -> int:
        return self.size


def budget(monkeypatch, memory: Memory, *, asked=None, share=0.75, workers=1, request=GIB, num_layers=2) -> int:
    monkeypatch.setattr(machine, "memory", lambda: memory)
    config = SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_memory_bytes=asked, gpu_memory_utilization=share),
        parallel_config=SimpleNamespace(local_world_size=workers),
        scheduler_config=SimpleNamespace(max_num_seqs=16),
    )
    return kv_memory.budget(config, [Spec(request)] * num_layers)


def test_kv_cache_takes_its_share(monkeypatch):
    # A quarter of 40 GiB stays free.
    assert budget(monkeypatch, Memory(40 * GIB, 20 * GIB)) == 10 * GIB
    assert budget(monkeypatch, Memory(40 * GIB, 20 * GIB), workers=2) == 5 * GIB


def test_kv_cache_leaves_a_gibibyte_to_a_small_machine(monkeypatch):
    assert budget(monkeypatch, Memory(4 * GIB, 3 * GIB)) == 2 * GIB


def test_kv_cache_takes_no_more_than_requests_can_fill(monkeypatch):
    assert budget(monkeypatch, Memory(400 * GIB, 300 * GIB)) == 2 * 16 * GIB


def test_kv_cache_is_what_was_asked_for(monkeypatch):
    assert budget(monkeypatch, Memory(40 * GIB, 20 * GIB), asked=3 * GIB) == 3 * GIB
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2.5")
    assert budget(monkeypatch, Memory(40 * GIB, 20 * GIB)) == int(2.5 * GIB)
    assert budget(monkeypatch, Memory(40 * GIB, 20 * GIB), asked=3 * GIB) == 3 * GIB


@pytest.mark.parametrize(
    ("memory", "asked"), [(Memory(4 * GIB, GIB), None), (Memory(4 * GIB, GIB), 2 * GIB), (Memory(99 * GIB, GIB), None)]
)
def test_too_little_memory_names_the_setting(memory, asked, monkeypatch):
    with pytest.raises(ValueError, match="--kv-cache-memory-bytes"):
        budget(monkeypatch, memory, asked=asked)
