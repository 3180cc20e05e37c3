"""`vllm-opset bench`: times kernels and compares them with their peers and with the ceilings of this machine."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from typer.core import TyperGroup

from vllm_opset import ops
from vllm_opset.bench import ceilings, peers
from vllm_opset.bench.ceilings import Ceilings
from vllm_opset.bench.format import command_line
from vllm_opset.bench.measure import Result, dtype_of, measure
from vllm_opset.bench.pictures import draw_ops
from vllm_opset.bench.plan import Plan, Work
from vllm_opset.bench.report import LEGEND, OpsReport, device_name, page
from vllm_opset.cli import outputs
from vllm_opset.cli.arguments import DTYPES, device_here, given, known, require_device
from vllm_opset.cli.ended import ended_by_sigterm, results_kept
from vllm_opset.cli.jobs import in_processes
from vllm_opset.cli.show import print_table
from vllm_opset.kernel import kernels_of
from vllm_opset.ops.contract import Op
from vllm_opset.overrides import nearest

DEVICES = ("cpu", "cuda")  # the devices on which kernels can be timed
KERNELS = "kernels"


class KernelsByDefault(TyperGroup):
    """A group in which `bench e2e` is a separate command. All other words after `bench` go to the kernels' command."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args and args[0] in self.commands else [KERNELS, *args])


def bench(
    context: typer.Context,
    names: Annotated[list[str] | None, typer.Argument(metavar="OP", help="Ops to time; all without one.")] = None,
    against: Annotated[list[str] | None, typer.Option(help=f"Only these peers, of {', '.join(peers.NAMES)}.")] = None,
    alone: Annotated[bool, typer.Option("--alone", help="No peers.")] = False,
    kernel: Annotated[
        str | None, typer.Option(help="Only the kernels of this name, or one variant: triton:prefill.")
    ] = None,
    case: Annotated[str, typer.Option(help="Only the cases that match this shell pattern.")] = "*",
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "bfloat16",
    random: Annotated[
        int | None, typer.Option(min=1, help="Time this many random problems instead of the fixed cases.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed of the random problems.")] = 0,
    jobs: Annotated[
        int, typer.Option(min=1, help="Processes that call all cases once before they are timed, to compile kernels.")
    ] = 1,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default the GPU, or the CPU without one.")] = None,
    conditions: outputs.Conditions = None,
    from_files: outputs.From = None,
    json_file: outputs.Json = None,
    plot: outputs.Plot = None,
    markdown_file: outputs.Markdown = None,
) -> None:
    """Time kernels and their peers on the device with cold caches, and check them against the reference.

    A kernel with variants is timed once with the variant that its table takes, and once with each other that can run
    the case. --random compares implementations on problems that ops draw, all together and by kind, such as how weights
    are stored. `vllm-opset bench e2e` times whole engines.

    After Ctrl-C, SIGTERM or an exception, it reports what it has measured, and exits with 1.
    """
    files = outputs.Outputs(from_files or [], json_file, markdown_file, plot)
    if files.sources:
        reports = [OpsReport.from_json(run) for run in files.read("device", context)]
    else:
        if random is None and "seed" in given(context):
            raise typer.BadParameter("only random problems have a seed: add --random", param_hint="--seed")
        drawn = None if random is None else {"number": random, "seed": seed}
        plan, missing = _plan(names or [], against or [], alone, kernel, case, dtype, device, drawn)
        again = (f" --device {device}" if device else "") + (f" --random {random} --seed {seed}" if drawn else "")
        report, left = _run(plan, missing, jobs, conditions, again)
        reports = [report]
    for report in reports:
        _print(report)
    files.write(reports, [report.as_json() for report in reports], page, draw_ops)
    if not files.sources and left:
        raise typer.Exit(1)


def _plan(
    names: list[str], against: list[str], alone: bool, kernel: str | None, case: str, dtype: str, device: str | None,
    drawn: Mapping[str, int] | None,
) -> tuple[Plan, dict[str, str]]:  # fmt: skip
    """The plan that the options of `bench` ask for. Also the peers that are not available, with the reasons."""
    device = device or device_here(DEVICES)
    require_device(device, DEVICES)
    if alone and against:
        raise typer.BadParameter("--alone leaves out the peers that --against asks for", param_hint="--alone")
    inputs = "bench_samples" if drawn is None else "draw"
    every = [op.name for op in ops.ALL if hasattr(op, inputs)]
    chosen = [_op(name, inputs) for name in dict.fromkeys(names or every)]
    found, missing = _peers([] if alone else list(dict.fromkeys(against or peers.NAMES)), device)
    in_dtype = DTYPES[known(dtype, DTYPES, "--dtype")]
    plan = Plan(tuple(op.name for op in chosen), device, in_dtype, kernel, tuple(found), case, drawn)
    _check_kernel(plan)
    return plan, missing


def _run(plan: Plan, missing: dict[str, str], jobs: int, conditions: str | None, again: str) -> tuple[OpsReport, int]:
    """Measure. Returns the number of measurements that were left, too.

    missing: the peers that are not available, with the reasons. again: the options that repeat any of the measurements.
    """
    work = plan.work()
    if not work:
        raise typer.BadParameter(f"no case matches {plan.pattern!r}", param_hint="--case")
    if jobs > 1:
        _call_ahead(plan, jobs)
    limits = ceilings.measure(plan.device, plan.dtype)
    results, left = _results(plan, work, limits)
    if left:
        conditions = " ".join(filter(None, [conditions, f"Ended before {left} of {len(work)} measurements."]))
    results = [dataclasses.replace(result, reproduce=result.reproduce + again) for result in results]
    command = f"vllm-opset {command_line(outputs.OUTPUTS)}"
    return OpsReport(device_name(plan.device), limits, results, missing, command, conditions, plan.drawn), left


def _call_ahead(plan: Plan, jobs: int) -> None:
    """Let that many processes call all cases, so that kernels are compiled before they are timed."""
    with ended_by_sigterm():
        shares = list(in_processes(plan.call_ahead, [(first, jobs) for first in range(jobs)], jobs))
    if failures := [failure for share in shares for failure in share]:
        typer.echo(f"{len(failures)} calls failed ahead of the measurement; the first: {failures[0]}", err=True)


def _results(plan: Plan, work: list[Work], limits: Ceilings) -> tuple[list[Result], int]:
    """The results, and how many measurements were left when Ctrl-C, SIGTERM or an exception ended them."""
    results, done = [], 0
    with results_kept(results):
        for op, sample, implementation in track(work, "timing", console=Console(stderr=True), transient=True):
            for candidate in plan.variants(op, sample, implementation):
                results.append(measure(op, sample, candidate, plan.device, dtype_of(op, plan.dtype), limits))
            done += 1
    return results, len(work) - done


def _check_kernel(plan: Plan) -> None:
    """Raise an error if the named kernel does not run on the device."""
    kernels = [one for name in plan.ops for one in kernels_of(name).values() if one.runs_on(plan.device)]
    variants = {f"{one.name}:{variant}" for one in kernels if one.variants for variant in one.variants.by_name}
    ours = {one.name for one in kernels} | variants
    if plan.kernel is not None and plan.kernel not in ours:
        raise typer.BadParameter(
            f"no kernel {plan.kernel!r} runs on {plan.device}; {nearest(plan.kernel, ours)}", param_hint="--kernel"
        )


def _peers(names: list[str], device: str) -> tuple[list[str], dict[str, str]]:
    """The peers that are available here, and the reasons why the others are not."""
    reasons = {name: peers.peer(known(name, peers.NAMES, "--against")).unavailable(device) for name in names}
    return [name for name in names if not reasons[name]], {name: why for name, why in reasons.items() if why}


def _op(name: str, inputs: str) -> Op:
    """The op of that name. inputs: the attribute of the contract that makes the inputs."""
    op = ops.BY_NAME[known(name, ops.BY_NAME, "OP")]
    if not hasattr(op, inputs):
        able = ", ".join(op.name for op in ops.ALL if hasattr(op, inputs))
        what = "random problems" if inputs == "draw" else "benchmark cases"
        raise typer.BadParameter(f"{name} has no {what}; these ops have: {able}", param_hint="OP")
    return op


def _print(report: OpsReport) -> None:
    for op, columns, rows in report.tables():
        print_table(op, columns, rows)
    if report.random is None:
        print(LEGEND)
    print(report.described())
    if report.conditions:
        print(report.conditions)
    for note in report.notes():
        print(note)
