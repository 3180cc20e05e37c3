"""A worker has as many threads as the user asks for, or as there are cores."""

import os
import re
import subprocess
import sys

import pytest
import torch
from readme import ROOT

from vllm_opset.platform.cpu import machine, threads


@pytest.fixture
def unset(monkeypatch) -> None:
    """No variable says a number of threads, and no engine of this process was configured."""
    for name in (threads.VARIABLE, "OMP_NUM_THREADS", threads.VLLMS_MARK):
        monkeypatch.setenv(name, "")  # so that what the test leaves there is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr(threads, "_remembered", "")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, [5, 2, 1]),
        ({"OMP_NUM_THREADS": "1"}, [1, 1, 1]),
        ({"OMP_NUM_THREADS": ""}, [5, 2, 1]),
        ({"OMP_NUM_THREADS": "2,4"}, [2, 2, 2]),
        ({"OMP_NUM_THREADS": "2", "OPSET_NUM_THREADS": "1"}, [1, 1, 1]),
        ({"OMP_NUM_THREADS": "1", "OPSET_NUM_THREADS": "auto"}, [5, 2, 1]),
        ({"OMP_NUM_THREADS": "2", "OPSET_NUM_THREADS": ""}, [2, 2, 2]),
    ],
)
def test_threads_of_a_worker(environment, expected, unset, monkeypatch):
    """Covers one, two and eight workers on five cores. vLLM sets 3."""
    monkeypatch.setattr(machine, "physical_cores", lambda: 5)
    monkeypatch.setattr(threads, "wait_asleep", lambda: None)  # which starts threads that never end
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    threads.remember_users_choice()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv(threads.VLLMS_MARK, "1")
    threads.remember_users_choice()
    before = torch.get_num_threads()
    try:
        assert [threads.set_compute_threads(workers) for workers in (1, 2, 8)] == expected
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("marks", "expected"), [(True, ["auto", "1", "auto", "7"]), (False, ["auto"] * 3 + ["7"])])
def test_each_engine_has_the_threads_that_were_asked_for_when_it_was_configured(marks, expected, unset, monkeypatch):
    """Where vLLM does not mark what it set itself, a later OMP_NUM_THREADS may be vLLM's."""
    monkeypatch.setattr(threads, "lacks", lambda name: lambda: not marks)
    choices = []
    for variable, value in ((None, None), ("OMP_NUM_THREADS", "1"), ("OMP_NUM_THREADS", ""), (threads.VARIABLE, "7")):
        if variable is not None:
            monkeypatch.setenv(variable, value)
        threads.remember_users_choice()
        choices.append(threads.users_choice())
    assert choices == expected


@pytest.mark.parametrize("word", ["all", "0"])
def test_a_number_of_threads_that_is_none_is_an_error(word, monkeypatch):
    monkeypatch.setenv(threads.VARIABLE, word)
    with pytest.raises(ValueError, match=f"OPSET_NUM_THREADS='{word}' is neither a number of threads nor 'auto'"):
        threads.set_compute_threads(1)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OMP_PROC_BIND": "close"},
        {"OMP_PLACES": "cores"},
        {"GOMP_CPU_AFFINITY": "0-63"},
        {"OMP_PROC_BIND": "FALSE", "OMP_PLACES": "cores", "GOMP_CPU_AFFINITY": "0-63"},
        {"OMP_PLACES": f"{{0:{os.cpu_count()}}}"},
    ],
)
def test_threads_are_bound_where_openmp_binds_the_thread_that_loads_pytorch_to_one_core(environment):
    if machine.cores_of(os.sched_getaffinity(0)) == 1:
        pytest.skip("one core is all that there is: runs where there are several")
    script = (
        "import os, torch; from vllm_opset.platform.cpu import machine, threads\n"
        "print(threads.are_bound(), machine.cores_of(os.sched_getaffinity(0)) == 1)"
    )
    process = run(script, environment)
    said, is_so = process.stdout.split()
    assert said == is_so, process.stderr


SLEEP = """
import time, torch
from vllm_opset.platform.cpu import machine, threads
machine.physical_cores = lambda: 2
threads.set_compute_threads(1)
x, before = torch.zeros(1 << 20), time.process_time()
for _ in range(10):
    x.add_(1)
    time.sleep(0.02)
print(time.process_time() - before)
"""


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) == 1, reason="threads of one CPU never wait actively: runs where there are several"
)
def test_threads_sleep_while_they_wait():
    """By default, GNU's OpenMP lets them wait actively for milliseconds after each of these sums."""
    asleep, active = (float(run(SLEEP, env).stdout) for env in ({}, {"GOMP_SPINCOUNT": "10000000"}))
    assert asleep < 0.05 < active, "OpenMP's runtime is not GNU's, or it has become another"


ENGINES = """
import os
from vllm_opset.platform.cpu import threads
os.sched_getaffinity = lambda pid: range(6)
for number in "4", "4", "3":
    os.environ[threads.VARIABLE] = number
    threads.set_compute_threads(1)
    print(len(os.listdir("/proc/self/task")))
"""


def test_engines_of_a_process_share_the_threads_that_never_work():
    first, second, of_fewer = map(int, run(ENGINES, {}).stdout.split())
    assert (second, of_fewer) == (first, first + 2)  # a Python thread, and the one of OpenMP that was missing


ENGINE = f"""
import os
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
import torch
from vllm import LLM
LLM("{ROOT / "examples/tiny-qwen3"}", max_model_len=64, kv_cache_memory_bytes=1 << 24)
print(torch.get_num_threads())
"""


@pytest.mark.engine
@pytest.mark.window
def test_an_engine_keeps_its_threads_after_its_model_is_loaded():
    """vLLM's worker for GPUs sets one thread then, unless the user has set OMP_NUM_THREADS."""
    process = run(ENGINE, {"OPSET_NUM_THREADS": "3"})
    assert process.stdout.split()[-1:] == ["3"], process.stderr
    said = process.stdout + process.stderr
    *_, (number, _) = re.findall(r"Computing with (\d) thread|Reducing Torch threads (from)", said)
    assert number == "3", said


def run(script: str, environment: dict[str, str]) -> subprocess.CompletedProcess:
    ours = ("OMP_", "GOMP_", "OPSET_NUM_THREADS")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return subprocess.run(
        [sys.executable, "-c", script], env=clean | environment, capture_output=True, text=True, timeout=120
    )
