"""Mutation testing: applies small changes, each to a copy of the tree, and lists those that no test detects.

    make mutants ARGS="--only sampler --jobs 4"

The changes are in the YAML files beside this one; `mutants.py` explains the rows. First every check runs on a copy
without a change: one that fails there, or runs nothing, is an error. Then each change runs its own check, which must
fail. Exits with 1 if one does not.
"""

import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from mutants import ROOT, Check, Mutant, mutants
from rich.console import Console
from rich.progress import track
from rich.table import Table

AGREES, DISAGREES = 0, 1  # exit codes of checks; any other means that the check could not run
# A change may make a test wait forever. The limit is much longer than the check takes without the change, on a machine
# with other work.
PATIENCE, LEAST_SECONDS = 5, 120

console = Console()


class Outcome(NamedTuple):
    """verdict: killed, timed out, crashed, SURVIVED or ERROR. output: the end of the check's output."""

    mutant: Mutant
    verdict: str
    seconds: float
    output: str


def main(
    only: Annotated[list[str] | None, typer.Option(help="Words of a change's name or file; may be repeated.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Checks to run at a time.")] = 2,
    gpu: Annotated[bool, typer.Option("--gpu", help="The changes that only a GPU tells, not the others.")] = False,
) -> None:
    """List the changes that no test sees; exits with 1 if there are any."""
    words = only or [""]
    chosen = [one for one in mutants() if one.gpu == gpu and any(word in f"{one.name} {one.file}" for word in words)]
    if not chosen:
        raise typer.BadParameter(f"no change is named {only!r}", param_hint="--only")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        copies = Copies(Path(folder), jobs)
        seconds = _baseline(pool, copies, {one.check for one in chosen})
        outcomes = _all(pool, lambda one: copies.use(partial(_tried, one, seconds[one.check])), chosen, "changes")
    _report(outcomes)
    raise typer.Exit(int(any(outcome.verdict in ("SURVIVED", "ERROR") for outcome in outcomes)))


class Copies:
    """Copies of the tree without the files that git ignores. One check at a time uses a copy."""

    def __init__(self, folder: Path, number: int) -> None:
        listed = subprocess.check_output(["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, text=True)
        files = [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
        self._free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for index in range(number):
            root = folder / str(index)
            for name in files:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name)
            self._free.put(root)

    def use(self, call: Callable):
        """Calls it with the root of a copy, and returns its result."""
        root = self._free.get()
        try:
            return call(root)
        finally:
            self._free.put(root)


def _baseline(pool: ThreadPoolExecutor, copies: Copies, checks: Iterable[Check]) -> dict[Check, float]:
    """How long each check takes without a change. Ends the command if one fails."""
    results = _all(pool, lambda check: (check, *copies.use(partial(_run, check, None))), checks, "unchanged")
    if red := [(check, code, output) for check, code, _, output in results if code != AGREES]:
        for check, code, output in red:
            console.print(f"[red]without any change, exit code {code}:[/] {check}\n{output}", highlight=False)
        raise typer.Exit(1)
    return {check: seconds for check, _, seconds, _ in results}


def _tried(mutant: Mutant, seconds: float, root: Path) -> Outcome:
    path = root / mutant.file
    original = path.read_text()
    path.write_text(mutant.applied(original))
    try:
        code, taken, output = _run(mutant.check, max(LEAST_SECONDS, PATIENCE * seconds), root)
    finally:
        path.write_text(original)
    verdict = {AGREES: "SURVIVED", DISAGREES: "killed", None: "timed out"}.get(code, "ERROR")
    if code is not None and code < 0:
        verdict = "crashed"  # by a signal: a change in C++ may corrupt memory
    console.print(f"{verdict}, {taken:.0f} s: {mutant.name}", highlight=False)
    return Outcome(mutant, verdict, taken, output)


def _run(check: Check, limit: float | None, root: Path) -> tuple[int | None, float, str]:
    """The exit code (None after `limit` seconds), the seconds taken, and the end of the output."""
    shared = root.parent
    environment = os.environ | {
        "PYTHONPATH": str(root),
        # Python would take a change of the same length within a second for the same file.
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OPSET_CACHE": str(shared / "cpp"),  # builds are found by their source
        "TRITON_CACHE_DIR": str(shared / "triton"),
        **check.environment,
    }
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            check.command, cwd=root, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            code = None
        output.seek(0)
        return code, time.monotonic() - began, output.read()[-3000:]


def _all(pool: ThreadPoolExecutor, run: Callable, items: Iterable, what: str) -> list:
    futures = [pool.submit(run, item) for item in items]
    shown = track(as_completed(futures), what, total=len(futures), console=console, transient=True)
    for _ in shown:
        pass
    return [future.result() for future in futures]


def _report(outcomes: list[Outcome]) -> None:
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    worst = [outcome for outcome in outcomes if outcome.verdict in ("SURVIVED", "ERROR")]
    if worst:
        table = Table("change", "file", "verdict", "what it would do", title="No test sees")
        for outcome in worst:
            table.add_row(outcome.mutant.name, str(outcome.mutant.file), outcome.verdict, outcome.mutant.why)
        console.print(table)
    for outcome in worst:
        if outcome.verdict == "ERROR":
            console.print(f"[red]{outcome.mutant.name}[/]: {outcome.mutant.check}\n{outcome.output}", highlight=False)
    slowest = max(outcomes, key=lambda outcome: outcome.seconds)
    console.print(", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())))
    console.print(f"the slowest took {slowest.seconds:.0f} s: {slowest.mutant.name}", highlight=False)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    typer.run(main)
