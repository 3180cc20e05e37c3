"""Runs comparisons of whole engines, each with a time limit: the tables of docs/benchmarks.

    python benchmarks/engine_comparisons.py --folder results [--limit 420] [--repetitions 2] [--case PATTERN]
        [--gpu 0 --gpu 1] qwen-8b llama-8b

Each GPU runs one comparison after the other, with its share of the processor's cores.

engine_comparisons.yaml names the comparisons. Each is one call of `vllm-opset bench e2e`, which writes NAME.json and
NAME.log into the folder. At its limit a comparison is asked to end, and then reports the cases that all engines have
answered. On a machine that is rented by the minute, one that hangs does not cost the others their time.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Queue
from typing import Annotated, NamedTuple

import psutil
import typer
import yaml
from rich.console import Console
from rich.table import Table

from vllm_opset.overrides import nearest

TABLE = Path(__file__).with_suffix(".yaml")
COMPLETE = "exit code 0"
# After its limit, a comparison has so many seconds to stop its engines and to write its results.
GRACE = 60


def options(name: str, cases: Sequence[str] = ()) -> list[str]:
    """The options of `bench e2e` for a comparison of engine_comparisons.yaml. cases: instead of its own."""
    table = yaml.safe_load(TABLE.read_text())
    comparison = table["comparisons"][name]
    arguments = table["arguments"] | comparison.get("arguments", {})
    environment = comparison.get("environment", table["environment"])
    found = ["--model", comparison["shape"], *comparison.get("how", table["how"])]
    for case in cases or comparison.get("cases", table["cases"]):
        found += ["--case", case]
    engines = comparison["engines"]
    for engine in engines:
        variables = dict(table["engines"][engines[engine] if isinstance(engines, dict) else engine])
        own = variables.pop("arguments", {})
        settings = {**arguments, **own, "env": variables | environment}
        found += ["--variant", f"{engine}={json.dumps(settings)}"]
    return found


class Place(NamedTuple):
    """Where a comparison runs. Its processes get these environment variables beside those of this process."""

    variables: dict[str, str]
    cores: set[int]


def places(gpus: Sequence[str]) -> list[Place]:
    """One for each GPU, or one with all GPUs. Cores that are left are not used."""
    cores = sorted(os.sched_getaffinity(0))
    if not gpus:
        return [Place({}, set(cores))]
    share = max(1, len(cores) // len(gpus))
    starts = (number * share % len(cores) for number in range(len(gpus)))
    return [
        Place({"CUDA_VISIBLE_DEVICES": gpu}, set(cores[start : start + share]))
        for gpu, start in zip(gpus, starts, strict=True)
    ]


def run(
    name: str,
    folder: Path,
    limit: int,
    repetitions: int,
    conditions: str,
    cases: Sequence[str],
    place: Place,
    running: list[subprocess.Popen],
) -> str:
    """Runs a comparison, and returns how it ended. running: its process is added to this list."""
    os.sched_setaffinity(0, place.cores)  # of this thread, and so of the processes that it starts
    command = [sys.executable, "-m", "vllm_opset", "bench", "e2e", *options(name, cases)]
    command += ["--repetitions", str(repetitions), "--json", str(folder / f"{name}.json")]
    command += ["--logs", str(folder / name), *(["--conditions", conditions] if conditions else [])]
    with open(folder / f"{name}.log", "w") as log:
        # In a session of its own, which Ctrl-C does not reach: this process then asks it to end.
        process = subprocess.Popen(
            command,
            env=os.environ | place.variables,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        running.append(process)
        try:
            return f"exit code {process.wait(limit)}"
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
        try:
            return f"ended at its limit, exit code {process.wait(GRACE)}"
        except subprocess.TimeoutExpired:
            kill(process)
            return f"killed {GRACE} s after its limit"


def kill(process: subprocess.Popen) -> None:
    """Kills a comparison with all its engines, which have sessions of their own.

    Engines that are stopped would never learn that the comparison has ended, and would keep the memory of their GPU.
    """
    family = psutil.Process(process.pid)
    for one in (family, *family.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def main(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Comparisons of engine_comparisons.yaml.")],
    folder: Annotated[Path, typer.Option(help="Where results and logs are written.")] = Path("results"),
    limit: Annotated[int, typer.Option(min=1, help="Seconds for each comparison.")] = 600,
    repetitions: Annotated[int, typer.Option(min=1, help="Runs of each engine and case that count.")] = 2,
    conditions: Annotated[str, typer.Option(help="What readers must know; it is kept with the results.")] = "",
    case: Annotated[list[str] | None, typer.Option(help="Only cases that match this shell pattern.")] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(help="A GPU, or several for one comparison as in 0,1. Comparisons on others run beside it."),
    ] = None,
) -> None:
    """Run comparisons of whole engines, one after the other on each GPU; exit with 1 if one is not complete."""
    known = yaml.safe_load(TABLE.read_text())["comparisons"]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"unknown: {name!r}; {nearest(name, known)}", param_hint="NAME")
    folder.mkdir(parents=True, exist_ok=True)
    free: Queue[Place] = Queue()
    running: list[subprocess.Popen] = []
    for place in places(gpu or ()):
        free.put(place)

    def ran(name: str) -> str:
        place = free.get()
        try:
            return run(name, folder, limit, repetitions, conditions, case or (), place, running)
        finally:
            free.put(place)

    with ThreadPoolExecutor(free.qsize()) as pool:
        try:
            ends = list(pool.map(ran, names))
        except BaseException:  # such as Ctrl-C, which does not reach processes in sessions of their own
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running:
                process.send_signal(signal.SIGTERM)
            raise
    table = Table("comparison", "end")
    for name, end in zip(names, ends, strict=True):
        table.add_row(name, end)
    Console().print(table)
    raise typer.Exit(any(end != COMPLETE for end in ends))


if __name__ == "__main__":
    typer.run(main)
