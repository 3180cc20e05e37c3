"""Processors, cores and memory, as control groups of both kinds report them, and the KV cache's share of the memory."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_opset.bench.format import describe_cpu
from vllm_opset.cli import doctor
from vllm_opset.platform.cpu import kv_memory, machine
from vllm_opset.platform.cpu.machine import Memory

GIB = 2**30


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    """`cgroup({file: text}, of_process)`: control groups with these files. of_process: the process's own groups."""
    groups, root = tmp_path / "groups_of_process", tmp_path / "cgroup"
    monkeypatch.setattr(machine, "CGROUP", root)
    monkeypatch.setattr(machine, "GROUPS_OF_PROCESS", groups)

    def write(files: dict[str, str], of_process: str = "4:cpu,cpuacct:/\n3:memory:/\n0::/\n") -> None:
        groups.write_text(of_process)
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)

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
    """A checkpoint that a second engine loads counts as an active file."""
    files = f"active_file {GIB // 16}\ninactive_file {GIB // 8}\n"
    cgroup({"memory.max": str(GIB // 2), "memory.current": str(GIB // 4), "memory.stat": files})
    assert machine.memory() == Memory(total=GIB // 2, available=GIB // 4 + GIB // 8 + GIB // 16)


def test_memory_of_a_control_group_of_the_first_kind(cgroup):
    cgroup({"memory/memory.limit_in_bytes": str(GIB // 2), "memory/memory.usage_in_bytes": str(GIB // 4)})
    assert machine.memory() == Memory(total=GIB // 2, available=GIB // 4)


@pytest.mark.parametrize(
    "files", [{"cpu.max": "150000 100000"}, {"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000"}]
)
def test_cores_of_a_quota(files, cgroup, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8), raising=False)
    monkeypatch.setattr(machine, "CPUS", Path("/no/such/folder"))
    assert machine.physical_cores() == 8
    cgroup(files)
    assert machine.physical_cores() == 1


@pytest.mark.parametrize(
    ("of_process", "files"),
    [
        (
            "0::/job/step\n",
            {
                "job/memory.max": GIB,
                "job/memory.current": GIB - GIB // 8,
                "job/cpu.max": "350000 100000",
                "job/step/memory.max": GIB // 2,
                "job/step/memory.current": GIB // 4,
                "job/step/cpu.max": "max 100000",
            },
        ),
        (
            "4:cpu,cpuacct:/job/step\n3:memory:/job\n0::/\n",
            {
                "memory/job/memory.limit_in_bytes": GIB // 2,
                "memory/job/memory.usage_in_bytes": GIB // 2,
                "memory/job/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB // 8}\ntotal_active_file 0\n",
                "cpu/job/cpu.cfs_quota_us": 350000,
                "cpu/job/cpu.cfs_period_us": 100000,
                "cpu/job/step/cpu.cfs_quota_us": -1,
            },
        ),
        (
            "0::/docker/of-the-host\n",
            {"memory.max": GIB // 2, "memory.current": GIB // 2 - GIB // 8, "cpu.max": "350000 100000"},
        ),
    ],
    ids=["second version", "first version", "container"],
)
def test_the_lowest_limits_of_the_process_and_of_the_groups_around_it(of_process, files, cgroup, monkeypatch):
    """Services and batch jobs have limits in groups of their own. A container may not see the path of its group."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8), raising=False)
    monkeypatch.setattr(machine, "CPUS", Path("/no/such/folder"))
    cgroup({name: str(value) for name, value in files.items()}, of_process)
    assert machine.memory() == Memory(total=GIB // 2, available=GIB // 8)
    assert machine.physical_cores() == 3


def test_groups_that_cannot_be_read_leave_the_limits_of_the_root(cgroup, monkeypatch):
    """Names of groups are bytes, lines may come that are not known, and a container may hide the process's groups."""
    cgroup({"memory.max": str(GIB // 2), "memory.current": "0"}, "\n0::/café\n7\n")
    machine.GROUPS_OF_PROCESS.write_bytes(machine.GROUPS_OF_PROCESS.read_bytes() + b"0::/\xff\n")
    assert machine.memory().total == GIB // 2
    machine.GROUPS_OF_PROCESS.unlink()
    assert machine.memory().total == GIB // 2


def test_threads_of_one_core_count_once(monkeypatch, tmp_path):
    for cpu in range(4):
        folder = tmp_path / f"cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    monkeypatch.setattr(machine, "CPUS", tmp_path)
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    assert machine.physical_cores() == 2
    assert describe_cpu().startswith("2 cores of an ") and doctor._machine()["CPU"].startswith("2 cores, ")


# Excerpt of Linux's /proc/cpuinfo: the lines that are read, with the flags for vectors and some others.
XEON_WITH_AMX = """
processor	: 0
vendor_id	: GenuineIntel
cpu family	: 6
model		: 143
model name	: Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz
stepping	: 8
cpu cores	: 2
flags		: fpu vme sse4_2 fma avx f16c avx2 avx512f avx512dq avx512cd avx512bw avx512vl avx_vnni avx512_bf16 \
avx512_vnni amx_bf16 avx512_fp16 amx_tile amx_int8
bogomips	: 5400.00
"""
EPYC_WITH_BF16 = """
processor	: 0
vendor_id	: AuthenticAMD
cpu family	: 25
model		: 17
model name	: AMD EPYC 9B14
stepping	: 1
flags		: fpu vme sse4_2 sse4a fma avx f16c avx2 avx512f avx512dq avx512cd avx512bw avx512vl avx512_bf16 \
avx512vbmi avx512_vbmi2 avx512_vnni avx512_bitalg avx512_vpopcntdq
TLB size	: 3584 4K pages

processor	: 1
vendor_id	: AuthenticAMD
model name	: AMD EPYC of the second socket
flags		: fpu vme
"""
XEON_WITH_AVX2 = """
processor	: 0
vendor_id	: GenuineIntel
model name	: Intel(R) Xeon(R) CPU E5-2686 v4 @ 2.30GHz
flags		: fpu vme sse4_2 fma avx f16c avx2
"""
CORE = """
processor	: 0
vendor_id	: GenuineIntel
model name	: Intel(R) Core(TM) i7-3770 CPU @ 3.40GHz
flags		: fpu vme sse4_2 avx f16c
"""
ARM = """
processor	: 0
BogoMIPS	: 2100.00
Features	: fp asimd evtstrm aes bf16
CPU implementer	: 0x41
"""


@pytest.mark.parametrize(
    ("text", "name", "vectors"),
    [
        (XEON_WITH_AMX, "Intel Xeon Platinum 8481C", "AMX"),
        (EPYC_WITH_BF16, "AMD EPYC 9B14", "AVX-512 with bf16"),
        (XEON_WITH_AVX2, "Intel Xeon CPU E5-2686 v4", "AVX2"),
        (CORE, "Intel Core i7-3770", "no AVX2"),
        (ARM, platform.machine(), "no AVX2"),
    ],
    ids=["Xeon with AMX", "EPYC with bf16", "Xeon with AVX2", "Core without AVX2", "ARM"],
)
def test_processors_are_named_with_what_they_have(text, name, vectors, monkeypatch, tmp_path):
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    found = machine.processor()
    assert (found.name, found.vectors) == (name, vectors)
    assert f"an {name} with {vectors}, " in describe_cpu()


@dataclass
class Spec:
    """The cache of a layer, which takes this many bytes for one request."""

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
    """And one more request: vLLM keeps a block for itself."""
    assert budget(monkeypatch, Memory(400 * GIB, 300 * GIB)) == 2 * 17 * GIB


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


def test_the_size_that_is_asked_for_counts_for_each_worker(monkeypatch):
    assert budget(monkeypatch, Memory(16 * GIB, 10 * GIB), asked=5 * GIB, workers=2) == 5 * GIB
    with pytest.raises(ValueError, match=r"6\.00 GiB for each of 2 workers is asked for, and 10\.00 GiB"):
        budget(monkeypatch, Memory(16 * GIB, 10 * GIB), asked=6 * GIB, workers=2)


def test_a_size_that_is_asked_for_is_not_cured_by_a_share_that_does_not_count(monkeypatch):
    with pytest.raises(ValueError, match="Ask for less by --kv-cache-memory-bytes or VLLM_CPU_KVCACHE_SPACE") as error:
        budget(monkeypatch, Memory(40 * GIB, 2 * GIB), asked=3 * GIB)
    assert "--gpu-memory-utilization" not in str(error.value)
