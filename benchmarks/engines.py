"""Engines that are up at the same time, of which one computes: the others are stopped by signal, and cannot spin."""

import json
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

CHILD = Path(__file__).with_name("engine_process.py")


@dataclass(frozen=True)
class Engine:
    """name: in tables. python: of its environment. eager: `enforce_eager` of vLLM."""

    name: str
    python: Path
    eager: bool


@dataclass(frozen=True)
class Answer:
    """seconds: of the generation as its user waits. cpu_seconds: what all its processes used of the cores meanwhile."""

    seconds: float
    cpu_seconds: float
    tokens: list[list[int]]


class EngineError(RuntimeError):
    """An engine ended. The message holds the end of its log."""


class RunningEngine:
    """An engine in processes of its own, stopped except while it starts or answers. Use in a `with`."""

    def __init__(self, engine: Engine, engine_args: dict, threads: int | None, log: Path) -> None:
        self.engine = engine
        self._log = log
        arguments = json.dumps(engine_args | {"enforce_eager": engine.eager})
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [engine.python, CHILD, arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment(threads),
                start_new_session=True,  # a process group of its own, for the signals
            )
        self.versions: dict[str, str] = self._read()["versions"]
        self._signal(signal.SIGSTOP)

    def __enter__(self) -> "RunningEngine":
        return self

    def __exit__(self, *_) -> None:
        self._signal(signal.SIGCONT)
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        finally:
            if psutil.pid_exists(self._process.pid):
                self._signal(signal.SIGKILL)

    def ask(self, prompts: list[list[int]], max_tokens: int) -> Answer:
        self._signal(signal.SIGCONT)
        before = self._cpu_seconds()
        print(json.dumps({"prompts": prompts, "max_tokens": max_tokens}), file=self._process.stdin, flush=True)
        answer = self._read()
        cpu_seconds = self._cpu_seconds() - before
        self._signal(signal.SIGSTOP)
        return Answer(answer["seconds"], cpu_seconds, answer["tokens"])

    def _read(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(f"{self.engine.name} ended:\n{self._log.read_text()[-3000:]}")
        return json.loads(line)

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def _cpu_seconds(self) -> float:
        family = psutil.Process(self._process.pid)
        return sum(sum(process.cpu_times()[:2]) for process in (family, *family.children(recursive=True)))


def environment(threads: int | None) -> dict[str, str]:
    """Of an engine's process: as its user has it, but offline. threads: compute threads, None for its own choice."""
    ours = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if threads is not None:
        # nobind: vLLM's own CPU platform then takes OMP_NUM_THREADS, as this project's does.
        ours |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "VLLM_", "OPSET_"))}
    return inherited | ours
