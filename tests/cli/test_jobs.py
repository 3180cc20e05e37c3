"""Commands that call kernels in several processes, which end with the command."""

import signal
import subprocess
import sys

import psutil
import pytest
from processes import environment, kill_group, wait_until

SLOW = """
import os, pathlib, time
from vllm_opset import ops
from vllm_opset.kernel import kernel

@kernel(ops.silu_and_mul, name="slow")
def silu_and_mul(x):
    pathlib.Path(os.environ["CALLED"], str(os.getpid())).touch()
    time.sleep(1000)
"""


@pytest.mark.parametrize("command", [("bench", "--alone"), ("parity",)], ids=["bench", "parity"])
def test_a_command_that_is_terminated_ends_its_processes(command, tmp_path):
    (tmp_path / "slow_kernel.py").write_text(SLOW)
    called = tmp_path / "called"
    called.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_opset", *command, "silu_and_mul", "--kernel", "slow", "--jobs", "2"],
        env=environment(PYTHONPATH=tmp_path, OPSET_IMPORT="slow_kernel", CALLED=called, OMP_NUM_THREADS=1),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_until(lambda: len([*called.iterdir()]) == 2, "both processes call the kernel")
        callers = [psutil.Process(int(file.name)) for file in called.iterdir()]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) in (1, 128 + signal.SIGTERM)
        _, alive = psutil.wait_procs(callers, timeout=10)
        assert not [caller for caller in alive if caller.status() != psutil.STATUS_ZOMBIE]
    finally:
        kill_group(process)
