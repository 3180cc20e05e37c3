"""`vllm-opset tune`: finds launch parameters for the family of this GPU, for use in launch.yaml."""

import itertools
import json
import math
from pathlib import Path
from typing import Annotated

import torch
import typer
import yaml
from rich.console import Console
from rich.progress import Progress

from vllm_opset.bench import tune
from vllm_opset.cli.arguments import known, writable
from vllm_opset.cli.ended import results_kept
from vllm_opset.cli.show import print_table
from vllm_opset.kernels.triton import _launch

BEST = 3  # the number of candidates to show for each case


def find(
    launches: Annotated[
        list[str] | None, typer.Argument(metavar="LAUNCH", help="Entries of launch.yaml; all without one.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", callback=writable, help="Write all measurements here.")
    ] = None,
) -> None:
    """Measure all candidates for launch parameters on this GPU, and print entries for launch.yaml.

    After Ctrl-C, SIGTERM or an exception, it reports the launches that it has measured, and exits with 1.
    """
    chosen = dict.fromkeys(known(launch, _launch.table(), "LAUNCH") for launch in launches or _launch.table())
    if not torch.cuda.is_available():
        raise typer.BadParameter("launch parameters are measured on a GPU, and there is none")
    measured: dict[str, list[tune.Trial]] = {}
    with results_kept(measured), Progress(console=Console(stderr=True), transient=True) as progress:
        for launch in chosen:
            measured[launch] = list(progress.track(tune.trials(launch), description=launch))
    left = len(chosen) - len(measured)
    _print(measured)
    if json_file:
        json_file.write_text(json.dumps({k: [vars(t) for t in v] for k, v in measured.items()}, indent=1) + "\n")
    if left:
        typer.echo(f"Ended before {left} of {len(chosen)} launches.", err=True)
        raise typer.Exit(1)


def _print(measured: dict[str, list[tune.Trial]]) -> None:
    for launch in [launch for launch, trials in measured.items() if not trials]:
        print(f"{launch}: no benchmark case reaches it on this GPU")
    measured = {launch: trials for launch, trials in measured.items() if trials}
    for launch, trials in measured.items():
        variant = tune.variant_of(launch)
        title = launch if variant is None else f"{launch}, for the variant {variant}"
        print_table(title, ("case", "size", *map(str, range(1, BEST + 1)), "slowest"), _ranking(trials))
    for launch, trials in measured.items():
        print(f"{launch}:\n    {_launch.target(torch.device('cuda'))}:")
        for entry in tune.entries(trials):
            shown = yaml.safe_dump(entry, default_flow_style=True, sort_keys=False, width=math.inf)
            print(f"      - {shown}", end="")


def _ranking(trials: list[tune.Trial]) -> list[dict]:
    rows = []
    for case in dict.fromkeys(trial.case for trial in trials):
        ranked = sorted((trial for trial in trials if trial.case == case), key=lambda trial: trial.seconds)
        shown = itertools.chain(map(_shown, ranked), itertools.repeat(None))  # some launches have two candidates
        best = {str(rank): next(shown) for rank in range(1, BEST + 1)}
        rows.append({"case": case, "size": ranked[0].size, **best, "slowest": _shown(ranked[-1])})
    return rows


def _shown(trial: tune.Trial) -> str:
    return f"{trial.seconds * 1e6:.2f} us: " + " ".join(f"{name} {value}" for name, value in trial.values)
