"""Engines that run at the same time, of which only one computes. A signal stops the others, so they cannot spin."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from vllm_opset.bench.cases import Request

CHILD = Path(__file__).with_name("engine_process.py")
# Prefixes of variables that configure vLLM, opset and OpenMP, and the variables that every engine gets.
CONFIGURES = ("OMP_", "VLLM_", "OPSET_")
ALWAYS = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
# Lines of an engine's log to show when it ends. vLLM prints an error twice, each time with a traceback.
LAST_LINES = 60
# Seconds to wait for an engine to end by itself, which takes an idle vLLM seconds, and for one that was killed.
PATIENCE, PATIENCE_WITH_KILLED = 60, 60


@dataclass(frozen=True)
class Engine:
    """The settings of an engine. name: for tables. args: of `LLM`, which override the common ones. env: its variables.

    python: the interpreter of its environment. site: a folder whose packages come before those of that environment.
    """

    name: str
    args: Mapping = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    python: Path = Path(sys.executable)
    site: Path | None = None


@dataclass(frozen=True)
class Started:
    """An engine's own report when it is up. seconds: since its process was started.

    versions: of Python and packages. platform: the class of vLLM's platform. device: its name; None for a CPU.
    compiled: the Triton kernels that were compiled, or loaded from Triton's cache, until then.
    """

    seconds: float
    versions: dict[str, str]
    platform: str
    device: str | None
    compiled: list[str]


@dataclass(frozen=True)
class Answer:
    """The answers to requests that were asked together. seconds: of the generation, until all are complete.

    cpu_seconds: CPU time of all the engine's processes during it. steps: those that gave a request tokens, summed
    over the requests. compiled: the Triton kernels that were compiled, or loaded from Triton's cache, for
    them. peak_bytes: the largest memory of one worker so far. On an accelerator that is the memory of PyTorch's
    allocator, and on a CPU resident memory. times: of requests with arrivals, the seconds from each one's arrival to
    each of its outputs, which have the tokens of one step.
    """

    seconds: float
    cpu_seconds: float
    tokens: list[list[int]]
    steps: int
    compiled: list[str]
    peak_bytes: int
    times: list[list[float]] | None = None


class EngineError(RuntimeError):
    """An engine ended. The message contains the end of its log."""


class RunningEngine:
    """An engine in its own processes, which are stopped except at the start or while `awake`. Use it in a `with`.

    args: of `LLM`, which the engine's own override. folder: for its log. env: variables, which the engine's own
    override.
    """

    def __init__(self, engine: Engine, args: Mapping, folder: Path, env: Mapping[str, str] | None = None) -> None:
        self.engine = engine
        self._arguments = json.dumps({**args, **engine.args})
        self._env = environment(engine, env or {})
        self._log = folder / f"{engine.name}.log"
        self._process: subprocess.Popen | None = None
        self._interrupted = False

    def __enter__(self) -> "RunningEngine":
        begin = time.perf_counter()
        with self._log.open("w") as errors:
            self._process = subprocess.Popen(
                [self.engine.python, CHILD, self._arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=self._env,
                start_new_session=True,  # a separate process group, for the signals
            )
        try:
            if self._interrupted:  # while there was no process to kill
                self._signal(signal.SIGKILL)
            said = self._read()
            self.started = Started(seconds=time.perf_counter() - begin, **said)
            self._signal(signal.SIGSTOP)
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(self, failure, *_) -> None:
        try:
            if failure is None:
                self._signal(signal.SIGCONT)
                self._process.stdin.close()
                with suppress(subprocess.TimeoutExpired):  # it has answered all requests
                    self._process.wait(timeout=PATIENCE)
        finally:
            self._kill()

    def interrupt(self) -> None:
        """Ends an engine that another thread starts or asks. EngineError is then raised there."""
        self._interrupted = True
        if self._process is not None:
            self._signal(signal.SIGKILL)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Within this context the engine answers."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def ask(self, requests: Sequence[Request]) -> Answer:
        """Let the engine answer these requests, while awake: at once, or at their arrivals if all have one."""
        request = {
            "prompts": [request.prompt for request in requests],
            "sampling": [{**request.sampling, "max_tokens": request.max_tokens} for request in requests],
        }
        if requests and all(one.arrival is not None for one in requests):
            request["arrivals"] = [one.arrival for one in requests]
        before = self._cpu_seconds()
        with suppress(BrokenPipeError):  # the engine has ended, and reading will report it
            print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._read()
        return Answer(cpu_seconds=self._cpu_seconds() - before, **answer)

    def _read(self) -> dict:
        # Waiting for the end of the pipe is not enough: a forked child may hold the pipe open after the engine's end.
        while not select.select([self._process.stdout], [], [], 1)[0]:
            if self._process.poll() is not None:
                break
        else:
            if line := self._process.stdout.readline():
                return json.loads(line)
        last = self._log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        raise EngineError("\n".join([f"{self.engine.name} ended. The end of its log:", *last]))

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _kill(self) -> None:
        """Ends the process group and waits for all of it: a killed process holds its memory until it has ended."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        limit = time.monotonic() + PATIENCE_WITH_KILLED
        while self._group_is_alive() and time.monotonic() < limit:
            time.sleep(0.01)
        with suppress(BrokenPipeError):  # data that is still buffered
            self._process.stdin.close()
        self._process.stdout.close()

    def _group_is_alive(self) -> bool:
        return any(_is_alive_in(self._process.pid, process) for process in psutil.process_iter())

    def _cpu_seconds(self) -> float:
        family = psutil.Process(self._process.pid)
        return sum(map(_cpu_seconds, (family, *family.children(recursive=True))))


def _cpu_seconds(process: psutil.Process) -> float:
    """The CPU time of a process and of the children that it has waited for. A process that has ended has none left."""
    with suppress(psutil.NoSuchProcess):  # it may end after it was listed, and its time then counts as its parent's
        return sum(process.cpu_times()[:4])
    return 0.0


def _is_alive_in(group: int, process: psutil.Process) -> bool:
    """A zombie is not alive: in a container nobody may ever wait for it."""
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def environment(engine: Engine, env: Mapping[str, str]) -> dict[str, str]:
    """The variables of an engine: this process's without those for vLLM or opset, then ALWAYS, `env`, and its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(CONFIGURES)}
    if engine.site is not None:
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(engine.site), kept.get("PYTHONPATH")]))
    return {**kept, **ALWAYS, **env, **engine.env}


def not_inherited() -> list[str]:
    """The variables of this process that its engines do not get."""
    return sorted(name for name in os.environ if name.startswith(CONFIGURES) and name not in ALWAYS)
