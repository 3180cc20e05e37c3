"""run.py FOLDER: all tests that need an NPU, in one command. Never run on hardware: `make test-ascend-hardware`.

Needs an Ascend NPU, CANN with its set_env.sh sourced, and an environment with torch_npu, vLLM and this checkout. Every
step is a process of its own with a time limit, so a step that fails or hangs does not end the others. Writes
report.json and report.txt into FOLDER after each step; exits with 1 unless all steps succeed.
"""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from report import Report, Result, Verdict

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MINUTE = 60


@dataclass(frozen=True)
class Step:
    """A program. Its last line is JSON whose `why_not`, or the whole of it, names the error; or its exit code does."""

    name: str
    command: tuple[str, ...]
    minutes: float = 10
    prints_json: bool = True


def steps() -> Iterator[Step]:
    """The steps that run after the probes."""
    import graphs

    for op in _ops_with_kernels():
        command = (sys.executable, "-m", "vllm_opset", "parity", op, "--device", "npu")
        yield Step(f"vllm-opset parity {op} --device npu", command, 30, prints_json=False)
    for op in ("reshape_and_cache", "paged_attention"):
        yield Step(f"parity of {op}, split caches", (sys.executable, str(HERE / "split_kv.py"), op), 30)
    for case in graphs.cases():
        yield Step(f"ACL graph: {case}", (sys.executable, str(HERE / "graphs.py"), case))
    yield Step("tokens with graphs and without", (sys.executable, str(HERE / "decode.py")), 30)
    yield Step("timing", (sys.executable, str(HERE / "timing.py")), 30)
    yield Step("vllm serve", (sys.executable, str(HERE / "serve.py")), 30)


def probe_steps() -> Iterator[tuple[Step, str, object, bool]]:
    """A step for each candidate of each constant, and whether the constant promises it."""
    import probes

    probes.kernels()  # imports torch_npu
    for constant, candidate in probes.all_candidates():
        command = (sys.executable, str(HERE / "probes.py"), constant, str(candidate))
        yield (
            Step(f"{constant}: {candidate}", command),
            constant,
            candidate,
            probes.PROBES[constant].promised(candidate),
        )


def run(step: Step) -> Result:
    """Runs a step to its end, or to its limit."""
    started = time.monotonic()
    try:
        done = subprocess.run(step.command, capture_output=True, text=True, timeout=step.minutes * MINUTE, cwd=ROOT)
    except subprocess.TimeoutExpired as late:
        output = (late.stdout or b"").decode() + (late.stderr or b"").decode()
        return Result(step.name, step.minutes * MINUTE, f"not done in {step.minutes} minutes", output=output)
    output, seconds = done.stdout + done.stderr, time.monotonic() - started
    last = (output.strip().splitlines() or ["nothing said"])[-1]
    if not step.prints_json:
        return Result(step.name, seconds, last if done.returncode else None, last, output if done.returncode else "")
    try:
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return Result(step.name, seconds, f"exit code {done.returncode}: {last}", output=output)
    why_not = found.get("why_not") if isinstance(found, dict) else found if isinstance(found, str) else None
    return Result(step.name, seconds, why_not, found, output if why_not else "")


def machine() -> dict:
    """The machine that the report describes, without names of hosts or people. It does not import PyTorch, which may
    fail.
    """
    names = {dist.name.lower().replace("-", "_") for dist in importlib.metadata.distributions()}
    versions = {
        name: importlib.metadata.version(name)
        for name in ("torch", "torch_npu", "vllm", "transformers")
        if name in names
    }
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    return {
        "commit": commit or "no git checkout",
        **versions,
        "CANN": os.environ.get("ASCEND_TOOLKIT_HOME") or os.environ.get("ASCEND_HOME_PATH") or "no set_env.sh sourced",
        "host": f"{platform.machine()}, Python {platform.python_version()}, {os.cpu_count()} cores",
    }


def why_no_device() -> str | None:
    """The reason why no device can be tested, with the cure, or None. Imports torch_npu if possible."""
    from vllm_opset.kernels import ascend

    if reason := ascend.missing():  # before torch is imported, which would load torch_npu and fail
        return reason
    import torch

    if reason := ascend.import_error():
        return reason

    return None if torch.npu.is_available() else "torch_npu finds no NPU: npu-smi info must list one"


def main(folder: Path) -> int:
    found = Report(machine())
    if reason := why_no_device():
        found.results.append(Result("a device", 0, reason))
        found.write(folder)
        print(found.as_text())
        return 1
    import torch

    found.machine["NPU"] = f"{torch.npu.device_count()} of {torch.npu.get_device_name()}"
    examine(found, folder)
    print(found.as_text())
    return 0 if found.passed else 1


def examine(found: Report, folder: Path) -> None:
    for step, constant, candidate, promised in probe_steps():
        result = run(step)
        found.verdicts.append(Verdict(constant, str(candidate), promised, result.why_not))
        found.write(folder)
        print(found.verdicts[-1], flush=True)
    for step in steps():
        found.results.append(run(step))
        found.write(folder)
        print(f"{step.name}: {found.results[-1].why_not or 'ok'}", flush=True)


def _ops_with_kernels() -> list[str]:
    import probes

    return list(dict.fromkeys(kernel.op for kernel in probes.kernels()))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
