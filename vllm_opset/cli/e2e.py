"""`vllm-opset bench e2e`: compares the speed of whole engines."""

import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_opset.bench import shapes
from vllm_opset.bench.cases import Case
from vllm_opset.bench.compare import Comparison, ComparisonPlan
from vllm_opset.bench.compare_report import BASELINE, Report, as_plain, legend, page, record
from vllm_opset.bench.engines import Engine, EngineError, not_inherited
from vllm_opset.bench.format import command_line
from vllm_opset.bench.pictures import draw_engines
from vllm_opset.cli import outputs
from vllm_opset.cli.arguments import folder
from vllm_opset.cli.ended import ended_by_sigterm
from vllm_opset.cli.show import print_table
from vllm_opset.overrides import nearest
from vllm_opset.platform import stock

# Keys of an engine's settings that are not arguments of LLM.
SETTINGS = ("env", "site")
# The settings of vLLM without the plugin. The name is the baseline's.
STOCK = {"env": {"OPSET_PLATFORM": "off"}}
# Of a run at a rate. The 99th percentile lies between the second and the third slowest.
REQUESTS = 200
MEMORY_HINT = "All engines are up together: fewer of them, or of the cases (--case), or --apart need less memory."


def compare(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(metavar="SHAPE", help=f"One of {', '.join(shapes.names())}.")] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="stock[=SITE]",
            help="Adds vLLM without the plugin, from this environment, or with the packages of the folder SITE first.",
        ),
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=JSON",
            help="Adds an engine, or changes the engine opset or stock. The JSON holds arguments of LLM. env sets "
            "environment variables, site names a folder of packages, and adapters is the number of random LoRA "
            'adapters, which requests take by turns. \'compiled={"compilation_config": {"mode": 3}}\'',
        ),
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option(help="Only cases whose name or kind matches this shell pattern.")
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(
            help="Adds a case in which so many requests arrive per second, and which gives percentiles of their "
            "latencies. Other cases then need --case."
        ),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=2, help=f"With --rate: the number of requests of a run, {REQUESTS} by default.")
    ] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="The number of measured runs of each engine and case.")] = 5,
    cold: Annotated[bool, typer.Option("--cold/--warm", help="Start with empty caches of compiled code.")] = True,
    apart: Annotated[
        bool,
        typer.Option("--apart/--together", help="One engine up at a time, instead of all by turns."),
    ] = False,
    at_once: Annotated[
        bool,
        typer.Option(
            "--at-once/--one-by-one", help="Start all engines at the same time. Each start then takes longer."
        ),
    ] = False,
    conditions: outputs.Conditions = None,
    from_files: outputs.From = None,
    json_file: outputs.Json = None,
    plot: outputs.Plot = None,
    markdown_file: outputs.Markdown = None,
    logs: Annotated[
        Path | None, typer.Option(callback=folder, help="Keep the log of each engine in this folder.")
    ] = None,
) -> None:
    """Time whole engines side by side: random weights, the same prompts, each engine in a process of its own.

    Engines do not inherit this shell's variables for vLLM, opset and OpenMP; --variant sets variables for them. A shape
    can draft for another: name it as the model of speculative_config.

    After Ctrl-C or SIGTERM, or if an engine ends, it reports the runs that all engines have done, if there are any,
    and exits with 1.
    """
    files = outputs.Outputs(from_files or [], json_file, markdown_file, plot)
    if files.sources:
        reports = [Report(run) for run in files.read("shape", context)]
    else:
        plan = _plan(model, case, against, variant, repetitions, cold, apart, at_once, rate or (), requests)
        reports = [Report(record(plan, _run(plan, logs), f"vllm-opset {command_line(outputs.OUTPUTS)}", conditions))]
    for report in reports:
        _print(report)
    files.write(reports, [report.run for report in reports], page, draw_engines)
    # A record that is kept may lack cases: only a run that was cut off has failed.
    if not files.sources and not all(report.is_complete for report in reports):
        raise typer.Exit(1)


def _plan(
    model, case, against, variant, repetitions: int, cold: bool, apart: bool, at_once: bool, rates=(), requests=None
) -> ComparisonPlan:
    """The comparison that the options of `bench e2e` ask for."""
    if model is None:
        raise typer.BadParameter(f"name a shape: one of {', '.join(shapes.names())}", param_hint="--model")
    if apart and at_once:
        raise typer.BadParameter("with --apart, only one engine is up at a time", param_hint="--at-once")
    if requests is not None and not rates:
        raise typer.BadParameter("only requests at a rate have a number: add --rate", param_hint="--requests")
    shape = _shape(model)
    arriving = _arriving(shape, rates, REQUESTS if requests is None else requests)
    cases = _cases(shape, case or ([] if rates else ["*"]), arriving)
    return ComparisonPlan(shape, cases, _engines(against or [], variant or []), repetitions, cold, apart, at_once)


def _run(plan: ComparisonPlan, logs: Path | None) -> Comparison:
    """Run the comparison, with a progress bar. logs: the folder for the engines' logs, which are else lost."""
    if dropped := not_inherited():
        print(f"Not given to the engines, --variant would: {', '.join(dropped)}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as name, ended_by_sigterm(), _progress(plan.steps) as step:
        if logs:
            logs.mkdir(parents=True, exist_ok=True)
        try:
            found = plan.run(Path(name), logs or Path(name), step)
        except EngineError as error:
            _explain(error, plan)
            raise typer.Exit(1) from error
        except (KeyboardInterrupt, SystemExit):
            print("Ended before all engines had answered a case.", file=sys.stderr)
            raise
    if found.failure:
        _explain(found.failure, plan)
    return found


def _explain(failure: EngineError, plan: ComparisonPlan) -> None:
    short = len(plan.engines) > 1 and not plan.apart and "memory" in str(failure).lower()
    print(f"{failure}\n{MEMORY_HINT}" if short else failure, file=sys.stderr)


def _print(report: Report) -> None:
    speed, starts = report.speed(spread=False), report.starts()
    print_table(f"{report.title}, {report.run['machine']}", speed[0], as_plain(speed))
    print_table("Engines", starts[0], as_plain(starts))
    Console().print(f"{legend([report])} {report.legend()}", markup=False, highlight=False)


@contextmanager
def _progress(steps: int):
    """A progress bar. It yields a function to call with the name of the next step."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=steps, completed=-1)
        yield lambda what: progress.update(task, advance=1, description=what)


def _shape(name: str) -> shapes.Shape:
    try:
        return shapes.load(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--model") from error


def _arriving(shape: shapes.Shape, rates: Iterable[float], requests: int) -> list[Case]:
    """A case for each rate."""
    try:
        return [shape.arriving(rate, requests) for rate in dict.fromkeys(rates)]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--rate") from error


def _cases(shape: shapes.Shape, patterns: Sequence[str], arriving: list[Case]) -> list[Case]:
    """The shape's cases that match a pattern, and those of requests that arrive at a rate."""
    known = [*shape.cases, *arriving]
    if unmatched := [pattern for pattern in patterns if not any(case.matches(pattern) for case in known)]:
        names = ", ".join(case.name for case in known)
        raise typer.BadParameter(
            f"no case matches {', '.join(unmatched)}; {shape.name} has {names}, and --rate adds others",
            param_hint="--case",
        )
    return [case for case in known if case in arriving or any(map(case.matches, patterns))]


def _engines(against: list[str], variants: list[str]) -> list[Engine]:
    """opset, stock if asked for, and the variants, in that order."""
    settings: dict[str, dict] = {"opset": {}}
    for word in against:
        name, _, site = word.partition("=")
        if name != BASELINE:
            raise typer.BadParameter(f"unknown: {name!r}; {nearest(name, [BASELINE])}", param_hint="--against")
        if not site and not stock.has_kernels():
            found = "this vLLM has no compiled kernels" if stock.installed() else "vLLM is not installed here"
            raise typer.BadParameter(
                f"{found}; name the folder of packages with one that has: stock=SITE", param_hint="--against"
            )
        settings[BASELINE] = STOCK | ({"site": site} if site else {})
    for word in variants:
        name, _, text = word.partition("=")
        if not name.isidentifier():  # the name is also the file name of a log
            raise typer.BadParameter(f"{name!r} is no name", param_hint="--variant")
        given, known = _settings(text), settings.get(name, STOCK if name == BASELINE else {})
        settings[name] = known | given | {"env": known.get("env", {}) | given.get("env", {})}
    return [_engine(name, of_engine) for name, of_engine in settings.items()]


def _settings(text: str) -> dict:
    try:
        settings = json.loads(text)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(
            f"not JSON after the name and =: {text!r} ({error})", param_hint="--variant"
        ) from error
    if not isinstance(settings, dict):
        raise typer.BadParameter(f"not a JSON object: {text!r}", param_hint="--variant")
    env = settings.get("env", {})
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise typer.BadParameter(f"env must be strings by name, not {env!r}", param_hint="--variant")
    return settings


def _engine(name: str, settings: dict) -> Engine:
    if not isinstance(settings.get("site", ""), str):
        raise typer.BadParameter(f"{name}: site must be a folder, not {settings['site']!r}", param_hint="--variant")
    site = Path(settings["site"]).expanduser().absolute() if "site" in settings else None
    if site and not site.is_dir():
        raise typer.BadParameter(f"{name}: there is no folder {site}")
    adapters = settings.get("adapters", 1)
    if not isinstance(adapters, int) or adapters < 1:
        raise typer.BadParameter(
            f"{name}: adapters must be a number from 1 on, not {adapters!r}", param_hint="--variant"
        )
    args = {key: value for key, value in settings.items() if key not in SETTINGS}
    return Engine(name, args, settings.get("env", {}), site=site)
