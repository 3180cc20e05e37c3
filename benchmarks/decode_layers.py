"""Times the decode layers of models in one CUDA graph, by turns for several overrides of the launch table.

    python benchmarks/decode_layers.py qwen3-8b:1:1088 llama-3.2-1b:4:4000:40960 \\
        --variant 'base=' --variant 'k32=paged_attention_decode.keys:32,paged_attention_decode.stages:2' \\
        --variant 'no_norm=-fused_add_rms_norm'

A minus leaves an op out, which tells what it costs in a layer.

`vllm-opset tune` times a kernel alone, and no call finds its operands in the cache. In a layer, a kernel starts while
its predecessor ends, and reads what that one has just written. So parameters that are best alone may not be best there.

Each shape has a process of its own, so a crash ends the measurement of that shape only. Its variants have the same
weights and KV caches, and each has a graph. The graphs are replayed by turns, in the opposite order every other round,
so drift of the machine affects them alike. The table shows the median µs of a layer for the first variant, and the
change for each of the others. A variant is marked with "differs" if attention in the first layer has another output
than with the first variant. Its mark "no LAUNCH" says that no kernel of the layers asks for a launch that it overrides.
--dry runs two layers in Triton's interpreter on the CPU, for shapes such as tiny:2:40.
"""

import json
import os
import statistics
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated
from unittest import mock

import decode_model
import torch
import typer
import yaml
from decode_model import Model, Step, why_unknown
from rich.console import Console
from rich.progress import track
from rich.table import Table

from vllm_opset import ops
from vllm_opset.bench import shapes
from vllm_opset.cli.arguments import writable
from vllm_opset.kernels.triton import _launch
from vllm_opset.kernels.triton._precompile import precompile
from vllm_opset.overrides import nearest

REPLAYS = 4  # A turn replays a graph so often.
SLEEP_CYCLES = 2_000_000  # The GPU sleeps for a millisecond, while the host launches a turn.
WARM_UP = 2  # So many rounds do not count.
DRY_LAYERS = 2  # The interpreter takes a second for a layer.
LARGEST_DIFFERENCE = 2**-5  # It is relative to the largest value.
SPAWN = get_context("spawn")  # CUDA does not work in a forked process.


@dataclass(frozen=True)
class Variant:
    """values: the launch parameters that differ from the table's, by launch. left_out: ops that are not called.

    results: of the ops that are left out, see `decode_model.without`. asked: the launches whose parameters kernels have
    asked for.
    """

    name: str
    values: Mapping[str, _launch.Parameters]
    left_out: frozenset[str]
    results: dict = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)

    @property
    def unused(self) -> list[str]:
        """The launches that it overrides in vain: no kernel has asked for them."""
        return sorted(self.values.keys() - self.asked)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside the context, kernels get these values. `_launch.trial` sets all values of a launch, for any size.

        What is left out is called once for each combination of shapes. Raises RuntimeError with the variant's name for
        any exception.
        """
        of_table = _launch.parameters

        def parameters(launch: str, device: torch.device, size: int) -> _launch.Parameters:
            self.asked.add(launch)
            return {**of_table(launch, device, size), **self.values.get(launch, {})}

        try:
            with (
                mock.patch.object(_launch, "parameters", parameters),
                mock.patch.object(decode_model, "run", decode_model.without(self.left_out, self.results)),
            ):
                yield
        except Exception as error:
            raise RuntimeError(f"{self.name}: {type(error).__name__}: {error}") from error


def step_of(text: str) -> Step:
    """The step that MODEL:REQUESTS:CONTEXT[:MAX_MODEL_LEN] describes. Raises typer.BadParameter."""
    name, *numbers = text.split(":")
    if len(numbers) not in (2, 3) or not all(number.isdecimal() and int(number) for number in numbers):
        raise typer.BadParameter(f"{text!r} is not MODEL:REQUESTS:CONTEXT or MODEL:REQUESTS:CONTEXT:MAX_MODEL_LEN")
    num_reqs, context, max_model_len = map(int, (*numbers, numbers[1])[:3])
    if max_model_len < context:
        raise typer.BadParameter(f"{text!r} has a context above its max_model_len")
    try:
        config = shapes.load(name).config
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if reason := why_unknown(config):
        raise typer.BadParameter(f"{name!r} is not supported: {reason}")
    return Step(text, config, num_reqs, context, max_model_len)


def variant_of(text: str) -> Variant:
    """The variant that NAME=LAUNCH.KEY:VALUE,-OP,... describes. Raises typer.BadParameter."""
    name, separator, overrides = text.partition("=")
    if not separator:
        raise typer.BadParameter(f"{text!r} is not NAME=LAUNCH.KEY:VALUE,-OP,... or NAME=")
    values: dict[str, dict[str, float]] = {}
    left_out = set()
    for override in filter(None, overrides.split(",")):
        if override.startswith("-"):
            left_out.add(_op(override[1:]))
            continue
        place, _, number = override.partition(":")
        launch, _, key = place.partition(".")
        if launch not in _launch.table():
            raise typer.BadParameter(f"unknown launch: {launch!r}; {nearest(launch, _launch.table())}")
        known, value = _launch.table()[launch]["candidates"], yaml.safe_load(number)
        if key not in known or not isinstance(value, int | float):
            raise typer.BadParameter(
                f"{override!r} gives no number to one of {launch}'s parameters: {', '.join(known)}"
            )
        values.setdefault(launch, {})[key] = value
    return Variant(name, values, frozenset(left_out))


def _op(name: str) -> str:
    if name not in ops.BY_NAME:
        raise typer.BadParameter(f"unknown op: {name!r}; {nearest(name, ops.BY_NAME)}")
    return name


def compile_kernels(step: Step, variants: Sequence[Variant]) -> None:
    """Compile what the variants launch into Triton's cache."""
    with torch.inference_mode():
        model = Model(step, "cuda", at_most=1)
        with precompile():
            for variant in variants:
                with variant.used():
                    model.forward(2)
    del model
    torch.cuda.empty_cache()  # many processes share the memory


def captured(model: Model, variant: Variant) -> Callable[[], torch.Tensor]:
    """A replay of the layers' graph. It returns attention's output in the first layer."""
    graph = torch.cuda.CUDAGraph()
    with variant.used():
        model.forward(2)  # loads the kernels
        torch.cuda.synchronize()
        graph.capture_begin()
        try:
            out = model.forward(model.num_layers)
        finally:
            graph.capture_end()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


def interpreted(model: Model, variant: Variant) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        with variant.used():
            return model.forward(DRY_LAYERS)

    return run


def gpu_microseconds(replay: Callable[[], torch.Tensor]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SLEEP_CYCLES)
    replay()  # does not count: the clocks rise, and the caches get what this variant leaves there
    start.record()
    for _ in range(REPLAYS):
        replay()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / REPLAYS


def cpu_microseconds(replay: Callable[[], torch.Tensor]) -> float:
    return 1e6 * timeit.timeit(replay, number=1)


def difference(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, to the largest value."""
    return ((out.float() - wanted.float()).abs().max() / wanted.float().abs().max()).item()


def measure(step: Step, variants: Sequence[Variant], rounds: int, dry: bool) -> dict:
    """By variant: µs of a layer in each round, the difference of attention's output, and launches that are not used."""
    make, microseconds = (interpreted, cpu_microseconds) if dry else (captured, gpu_microseconds)
    with torch.inference_mode(), nullcontext() if dry else torch.cuda.stream(torch.cuda.Stream()):
        model = Model(step, "cpu" if dry else "cuda")
        num_layers = DRY_LAYERS if dry else model.num_layers
        replays = {variant.name: make(model, variant) for variant in variants}
        outputs = {name: replay().clone() for name, replay in replays.items()}
        times = {name: [] for name in replays}
        for number in range(rounds if dry else rounds + WARM_UP):
            for name in replays if number % 2 == 0 else reversed(replays):
                times[name].append(microseconds(replays[name]) / num_layers)
        wanted, unused = outputs[variants[0].name], {variant.name: variant.unused for variant in variants}
        return {
            "device": "cpu" if dry else torch.cuda.get_device_name(),
            "layers": num_layers,
            "distinct_weights": len(model.layers),
            "variants": {
                name: {"us": times[name][-rounds:], "difference": difference(out, wanted), "unused": unused[name]}
                for name, out in outputs.items()
            },
        }


def in_a_process(call: Callable[..., dict], *args) -> dict:
    """Its result, or {"error": ...} if it raises or the process dies."""
    with ProcessPoolExecutor(1, mp_context=SPAWN) as pool:
        try:
            return pool.submit(call, *args).result()
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}


def main(
    steps: Annotated[list[Step], typer.Argument(parser=step_of, metavar="MODEL:REQUESTS:CONTEXT[:MAX_MODEL_LEN]...")],
    variants: Annotated[
        list[Variant],
        typer.Option(
            "--variant", parser=variant_of, metavar="NAME=LAUNCH.KEY:VALUE,-OP,...", help="The first is the base."
        ),
    ],
    rounds: Annotated[int, typer.Option(min=1, help="How often each variant is timed.")] = 20,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that compile kernels, each for a shape.")] = 4,
    dry: Annotated[
        bool, typer.Option("--dry", help="Time two layers once, in Triton's interpreter on the CPU.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", callback=writable, help="Write all times here, in µs of a layer.")
    ] = None,
) -> None:
    """Time the decode layers of models by turns for several overrides of the launch table."""
    if len({variant.name for variant in variants}) < len(variants):
        raise typer.BadParameter("two variants have the same name", param_hint="--variant")
    if dry:
        os.environ["TRITON_INTERPRET"], rounds = "1", 1  # for the processes that run kernels
    elif not torch.cuda.is_available():
        typer.echo("layers are timed on a GPU, and there is none; --dry runs two of them on the CPU", err=True)
        raise typer.Exit(1)
    else:
        with ProcessPoolExecutor(jobs, mp_context=SPAWN) as pool:
            compiled = [pool.submit(compile_kernels, step, variants) for step in steps]
            # What does not compile raises again where it is measured.
            for one in track(compiled, "compiling", console=Console(stderr=True), transient=True):
                one.exception()
    shown = track(steps, "timing", console=Console(stderr=True), transient=True)
    found = {step.text: in_a_process(measure, step, variants, rounds, dry) for step in shown}
    if json_file:
        json_file.write_text(json.dumps(found, indent=1))
    _print(found, [variant.name for variant in variants])
    raise typer.Exit(any("error" in report for report in found.values()))


def _print(found: Mapping[str, dict], names: Sequence[str]) -> None:
    table = Table("shape", f"{names[0]}, µs a layer", *names[1:])
    for shape, report in found.items():
        if "error" in report:
            print(f"{shape} failed: {report['error']}")
            continue
        base, *others = (report["variants"][name] for name in names)
        us = statistics.median(base["us"])
        table.add_row(shape, f"{us:.2f}", *(_change(other, us) for other in others))
    Console().print(table)


def _change(measured: Mapping, base: float) -> str:
    change = [f"{100 * (statistics.median(measured['us']) / base - 1):+.1f} %"]
    if not measured["difference"] <= LARGEST_DIFFERENCE:  # or NaN
        change.append("differs")
    return ", ".join([*change, *(f"no {launch}" for launch in measured["unused"])])


if __name__ == "__main__":
    typer.run(main)
