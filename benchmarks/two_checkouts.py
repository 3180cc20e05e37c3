"""Times the kernels of another checkout and of this one by turns, case by case: what a change costs or gains.

    git worktree add ../before COMMIT
    python benchmarks/two_checkouts.py ../before

Each checkout has a process of its own, and the other one has a second process, which shows the noise. A case is timed
in all three by turns, in the opposite order every other round, so drift of the machine affects them alike. The time of
a case is the least of its rounds. Prints the cases whose times differ, and the geometric mean of all ratios.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from vllm_opset.bench.format import TIMES
from vllm_opset.cli.arguments import writable

HERE = Path(__file__).resolve().parent
WORKER = HERE / "kernel_times.py"

Key = tuple[str, str, str]


class Checkout:
    """The kernels of a checkout, in a process of their own. keys: its cases, [op, kernel, case]."""

    def __init__(self, root: Path, device: str, dtype: str) -> None:
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))}
        command = [sys.executable, str(WORKER), device, dtype]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.keys: list[Key] = [tuple(key) for key in self._read()]

    def seconds(self, key: Key) -> float:
        return self._ask(key, timed=True)

    def unsupported(self, key: Key) -> str | None:
        """Why the kernel does not support the case. If it does, it was called once, so what it launches is compiled."""
        return self._ask(key, timed=False)

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, key: Key, timed: bool):
        print(json.dumps([*key, timed]), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self):
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of a checkout ended with {self._process.wait()}")
        return json.loads(line)


@contextmanager
def checkouts(roots: Sequence[Path], device: str, dtype: str) -> Iterator[list[Checkout]]:
    with ThreadPoolExecutor(len(roots)) as pool:
        made = list(pool.map(lambda root: Checkout(root, device, dtype), roots))
    try:
        yield made
    finally:
        for one in made:
            one.end()


def supported(roots: Sequence[Path], case: str, jobs: int, device: str, dtype: str) -> list[Key]:
    """The cases that both checkouts have and support, and that match the pattern.

    Every case is called once in each checkout, by `jobs` processes at the same time. So kernels are compiled into
    Triton's cache before any is timed.
    """

    def call(which: int, one: Checkout) -> set[Key]:
        return {key for key in keys[which % jobs :: jobs] if one.unsupported(key)}

    processes = [root for root in roots for _ in range(jobs)]
    with checkouts(processes, device, dtype) as made, ThreadPoolExecutor(len(made)) as pool:
        of_both = set(made[0].keys) & set(made[-1].keys)
        keys = [key for key in made[0].keys if key in of_both and fnmatch(" ".join(key), case)]
        if not keys:
            raise typer.BadParameter(f"both checkouts have no case that matches {case!r}", param_hint="--case")
        unsupported = set().union(*pool.map(call, range(len(made)), made))
    return [key for key in keys if key not in unsupported]


def measure(processes: Sequence[Checkout], keys: Sequence[Key], rounds: int) -> dict[Key, list[float]]:
    """The least seconds of each case in each process."""
    found = {}
    for key in track(keys, "timing", console=Console(stderr=True), transient=True):
        seconds = {process: [] for process in processes}
        for number in range(rounds):
            for process in processes if number % 2 == 0 else reversed(processes):
                seconds[process].append(process.seconds(key))
        found[key] = [min(seconds[process]) for process in processes]
    return found


def main(
    before: Annotated[Path, typer.Argument(help="The other checkout.", exists=True, file_okay=False)],
    case: Annotated[str, typer.Option(help="Only cases whose 'OP KERNEL CASE' matches this pattern.")] = "*",
    rounds: Annotated[int, typer.Option(min=1, help="How often each case is timed in each checkout.")] = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that compile each checkout's kernels.")] = 1,
    differing: Annotated[float, typer.Option(help="Print the cases that differ by this share or more.")] = 0.01,
    dtype: str = "bfloat16",
    device: str = "cuda",
    json_file: Annotated[
        Path | None, typer.Option("--json", callback=writable, help="Write all times here, in seconds.")
    ] = None,
) -> None:
    """Time the kernels of two checkouts by turns."""
    roots = (before.resolve(), HERE.parent)
    keys = supported(roots, case, jobs, device, dtype)
    with checkouts([*roots, roots[0]], device, dtype) as processes:
        found = measure(processes, keys, rounds)
    if json_file:
        json_file.write_text(json.dumps([[*key, *times] for key, times in found.items()], indent=1))
    _print(found, differing)


def _print(found: dict[Key, list[float]], differing: float) -> None:
    ratios = {key: (after / before, again / before) for key, (before, after, again) in found.items()}
    table = Table("op", "kernel", "case", "before, µs", "after, µs", "after to before", "before again")
    for key in sorted(found, key=ratios.get, reverse=True):
        if abs(ratios[key][0] - 1) >= differing:
            times = (f"{1e6 * seconds:.2f}" for seconds in found[key][:2])
            table.add_row(*key, *times, *(f"{ratio:.3f}{TIMES}" for ratio in ratios[key]))
    Console().print(table)
    after, again = zip(*ratios.values(), strict=True)
    print(f"Geometric mean of {len(ratios)} cases: {statistics.geometric_mean(after):.3f}{TIMES}")
    print(f"Before again: from {min(again):.3f}{TIMES} to {max(again):.3f}{TIMES}")


if __name__ == "__main__":
    typer.run(main)
