"""Real programs for the tests: commands, scripts and `vllm serve`, each in a clean environment, ended afterwards."""

import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from readme import ROOT, block

import vllm_opset

PROGRAMS = Path(sys.executable).parent
MODEL = Path("examples/tiny-qwen3")
# The limit for operations that take seconds: only a hang may reach it, not a busy machine.
PATIENCE = 300
# The programs that the tests start do not inherit these settings of vLLM and the plugin.
OURS = ("VLLM_", "OPSET_", "OMP_", "GOMP_", "PYTHONPATH")
# They import the package that the tests import, which may be in another folder than the installed one.
PACKAGES = str(Path(vllm_opset.__file__).parents[1])

# A traceback line that runs through the plugin contains this.
OUR_FRAME = f'File "{Path(vllm_opset.__file__).parent}/'


def environment(**variables: object) -> dict[str, str]:
    """This process's environment without the variables that configure vLLM or the plugin, and with `variables`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    ours = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PATH": f"{PROGRAMS}{os.pathsep}{kept['PATH']}"}
    given = {name: str(value) for name, value in variables.items()}
    paths = os.pathsep.join(filter(None, (given.get("PYTHONPATH"), PACKAGES)))
    return kept | ours | given | {"PYTHONPATH": paths}


@dataclass(frozen=True)
class Finished:
    """A program's exit code, standard output and standard error."""

    code: int
    out: str
    err: str

    @property
    def output(self) -> str:
        return self.out + self.err

    def __str__(self) -> str:
        return f"exit code {self.code}\n{self.output}"


def run(*command: object, **variables: object) -> Finished:
    """Runs a program of this environment in the repository until it ends. A hang raises subprocess.TimeoutExpired."""
    process = subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(**variables),
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        kill_group(process)
    return Finished(process.returncode, out, err)


def kill_group(process: subprocess.Popen) -> None:
    """Ends a process that was started in a session of its own, and all processes that it started."""
    if group_is_alive(process):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def group_is_alive(process: subprocess.Popen) -> bool:
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition, what: str) -> None:
    """Polls until the condition holds. Raises TimeoutError."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"still not: {what}")
        time.sleep(0.05)


def serve_command(model: Path = MODEL) -> list[str]:
    """The README's command, with its own model or another."""
    vllm, serve, _, *arguments = shlex.split(block("", f"vllm serve {MODEL} ").splitlines()[0])
    return [vllm, serve, str(model), *arguments]


def free_port() -> int:
    """A port without a listener that no connection gets while a server starts: Linux gives these 32768 and up."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


class Server:
    """A `vllm serve`, started with the README's command and further arguments. `log` is a file for its output."""

    def __init__(self, log: Path, *arguments: str, model: Path = MODEL, **variables: object) -> None:
        port = free_port()
        self.log = log
        address = ["--host", "127.0.0.1", "--port", str(port)]
        # More threads than a tiny model can use would only take cores from the other test processes.
        variables = {"OMP_NUM_THREADS": 1, **variables}
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*serve_command(model), *address, "--disable-uvicorn-access-log", *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment(**variables),
                start_new_session=True,
            )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE)

    # Start and end

    def wait_until_ready(self) -> "Server":
        def ready() -> bool:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.text()}")
            try:
                return self.http.get("/health").status_code == 200
            except httpx.TransportError:
                return False

        wait_until(ready, "the server is ready")
        return self

    def stop(self, number: signal.Signals = signal.SIGTERM, everyone: bool = False) -> int:
        """Signals the server, or its process group as Ctrl-C does. Waits for its end and returns its exit code."""
        (os.killpg if everyone else os.kill)(self.process.pid, number)
        return self.wait()

    def wait(self) -> int:
        return self.process.wait(timeout=PATIENCE)

    def assert_ended_well(self, code: int) -> None:
        """vLLM logs its own EngineDeadError in most shutdowns; the plugin need not fix that."""
        assert code == 0, self.text()
        assert OUR_FRAME not in self.text(), self.text()
        wait_until(lambda: not group_is_alive(self.process), "no process is left behind")

    def kill(self) -> None:
        """Ends the server in any case, and the processes that it may have left behind."""
        self.http.close()
        kill_group(self.process)

    def text(self) -> str:
        return self.log.read_text()

    # Requests and answers

    def post(self, path: str, body: dict | str | bytes) -> httpx.Response:
        content = body if isinstance(body, str | bytes) else json.dumps(body)
        return self.http.post(path, content=content, headers={"Content-Type": "application/json"})

    def complete(self, prompt: object, **options: object) -> dict:
        """The answer of /v1/completions: greedy unless `options` say otherwise."""
        return self._answer("/v1/completions", {"prompt": prompt, **options})

    def chat(self, question: str, **options: object) -> dict:
        return self._answer("/v1/chat/completions", {"messages": [{"role": "user", "content": question}], **options})

    def _answer(self, path: str, body: dict) -> dict:
        response = self.post(path, {"model": "tiny", "temperature": 0, **body})
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, path: str, body: dict) -> Iterator[dict]:
        """The frames of a streamed answer, without the [DONE] that must close it."""
        body = {"model": "tiny", "temperature": 0, "stream": True, **body}
        with self.http.stream("POST", path, json=body) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            yield from frames(response.iter_lines())

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a Prometheus metric over all series with these labels."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        lines = [
            line for line in self.http.get("/metrics").text.splitlines() if line.startswith((f"{name}{{", f"{name} "))
        ]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in wanted))


def frames(lines) -> Iterator[dict]:
    """Parses server-sent events, each one `data:` line."""
    done = False
    for line in lines:
        if line:
            assert line.startswith("data: "), line
            assert not done, f"after [DONE]: {line}"
            done = line == "data: [DONE]"
            if not done:
                yield json.loads(line.removeprefix("data: "))
    assert done, "the stream ended without [DONE]"
