"""`vllm-opset bench`: times kernels and compares them with their peers and with the ceilings of this machine."""

import json
import os
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from typer.core import TyperGroup

from vllm_opset import ops
from vllm_opset.bench import ceilings, peers
from vllm_opset.bench.measure import Candidate, candidates, cases, dtype_of, measure
from vllm_opset.bench.report import LEGEND, Report, device_name, draw
from vllm_opset.bench.text import asked_for
from vllm_opset.cli.show import print_table
from vllm_opset.cli.words import DTYPES, known, picture, require_device, writable
from vllm_opset.kernel import kernels_of
from vllm_opset.ops.contract import Op, Sample
from vllm_opset.selection import nearest

DEVICES = ("cpu", "cuda")  # the devices on which kernels can be timed
OUTPUTS = ("--json", "--plot", "--page")
KERNELS = "kernels"


class KernelsByDefault(TyperGroup):
    """A group in which `bench e2e` is a separate command. All other words after `bench` go to the kernels' command."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args and args[0] in self.commands else [KERNELS, *args])


def bench(
    names: Annotated[list[str] | None, typer.Argument(metavar="[OP]...", help="Ops to time; all without one.")] = None,
    against: Annotated[list[str] | None, typer.Option(help=f"Only these peers, of {', '.join(peers.NAMES)}.")] = None,
    alone: Annotated[bool, typer.Option("--alone", help="No peers.")] = False,
    kernel: Annotated[str | None, typer.Option(help="Only the kernels of this name.")] = None,
    case: Annotated[str, typer.Option(help="Only the cases that match this shell pattern.")] = "*",
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "bfloat16",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; what there is without it.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", callback=writable, help="Write the results here.")] = None,
    plot: Annotated[Path | None, typer.Option(callback=picture, help="Draw a roofline here (matplotlib).")] = None,
    page: Annotated[
        Path | None, typer.Option(callback=writable, help="Write a page of documentation here (Markdown).")
    ] = None,
) -> None:
    """Time kernels and their peers on the device with cold caches, and check them against the reference.

    `vllm-opset bench e2e` times whole engines.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    require_device(device, DEVICES)
    if alone and against:
        raise typer.BadParameter("--alone leaves out the peers that --against asks for", param_hint="--alone")
    chosen = [_op(name) for name in names or [op.name for op in ops.ALL if hasattr(op, "bench_samples")]]
    found, missing = _peers([] if alone else against or list(peers.NAMES), device)
    work = _work(chosen, device, DTYPES[known(dtype, DTYPES, "--dtype")], kernel, found, case)
    if not work:
        raise typer.BadParameter(f"no case matches {case!r}", param_hint="--case")
    limits = ceilings.measure(device, DTYPES[dtype])
    results = [
        measure(op, sample, candidate, device, dtype_of(op, DTYPES[dtype]), limits)
        for op, sample, candidate in track(work, "timing", console=Console(stderr=True), transient=True)
    ]
    report = Report(device_name(device), limits, results, missing)
    _print(report)
    if plot:
        draw(report, plot)
    if page:
        page.write_text(
            report.as_markdown(f"vllm-opset {asked_for(OUTPUTS)}", os.path.relpath(plot, page.parent) if plot else None)
        )
    if json_file:
        json_file.write_text(json.dumps(report.as_json(), indent=2) + "\n")


def _work(
    chosen: list[Op], device: str, dtype: torch.dtype, kernel: str | None, against: list[str], pattern: str
) -> list[tuple[Op, Sample, Candidate]]:
    """All measurements to make. Measurements of one case are next to each other."""
    implementations = {op.name: list(candidates(op, device, kernel, against)) for op in chosen}
    ours = {one.name for op in chosen for one in kernels_of(op.name).values() if one.runs_on(device)}
    if kernel is not None and kernel not in ours:
        raise typer.BadParameter(
            f"no kernel {kernel!r} runs on {device}; {nearest(kernel, ours)}", param_hint="--kernel"
        )
    return [
        (op, sample, candidate)
        for op in chosen
        for sample in cases(op, device, dtype_of(op, dtype), pattern)
        for candidate in implementations[op.name]
    ]


def _peers(names: list[str], device: str) -> tuple[list[str], dict[str, str]]:
    """The peers that are available here, and the reasons why the others are not."""
    reasons = {name: peers.peer(known(name, peers.NAMES, "--against")).unavailable(device) for name in names}
    return [name for name in names if not reasons[name]], {name: why for name, why in reasons.items() if why}


def _op(name: str) -> Op:
    op = ops.BY_NAME[known(name, ops.BY_NAME, "OP")]
    if not hasattr(op, "bench_samples"):
        raise typer.BadParameter(f"{name} has no benchmark cases", param_hint="OP")
    return op


def _print(report: Report) -> None:
    for op, columns, rows in report.tables():
        print_table(op, columns, rows)
    print(LEGEND)
    print(report.described())
    for note in report.notes():
        print(note)
