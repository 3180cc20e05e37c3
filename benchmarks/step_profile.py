"""Measures a step of an engine: the time of the GPU's kernels by kind, and the host's calls of CUDA.

    OPSET_PLATFORM=off python benchmarks/step_profile.py gemma-2-9b --decoding 64 --prompt 2500 [--sampled]

The engine runs in this process with random weights, and OPSET_PLATFORM decides on its form. Some requests generate
tokens, and then a prompt joins them. The time until its first token is measured, which is that of the step that
computes both. Without --prompt, the time until one more token is. Requests that the engine does not compute in one step
are refused. All is done several times: first with a clock alone, then with PyTorch's profiler, which makes the host
slower and leaves the GPU as it is. A kernel that starts while another runs counts from the end of that one, so the
times of all kinds add up. Prints medians.
"""

import json
import os
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, NamedTuple

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from vllm_opset.bench import shapes
from vllm_opset.bench.cases import GREEDY, SAMPLED, SPECIAL_IDS
from vllm_opset.cli.arguments import writable

CONTEXT = 512  # tokens of each prompt whose request generates
WARM_UP = 2  # repetitions that do not count
# The first pattern that is in a kernel's name gives its kind.
KINDS = {
    "experts": "expert|moe|route|permute|gating",
    "attention": "attend|attention|flash|fmha|combine|^plan|paged|rope|rotary|and_cache",
    "sampler": "sampl|gumbel|top_?k|top_?p|penal|logit|argmax|softmax|^(start|read|reread|process|finish)$",
    "products": "gemm|nvjet|cutlass|linear|xmma|cublas|decode_sm90|multiply_|sum_splits",
    "norms and activations": "norm|silu|gelu|act_and_mul|gated|quantise",
    "copies": "memcpy|memset|copy",
}
LAUNCHES, REPLAYS = "launches of kernels", "launches of graphs"
# Calls of CUDA by the host.
CALLS = {
    LAUNCHES: "LaunchKernel|LaunchCooperativeKernel",
    REPLAYS: "GraphLaunch",
    "copies": "Memcpy|Memset",
    "waits": "Synchronize",
}


class Span(NamedTuple):
    """A kernel, or a call of CUDA. Times are in µs."""

    name: str
    start: float
    end: float


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "others")


def own_times(spans: Iterable[Span]) -> Iterator[tuple[Span, float]]:
    """Yields each with the time in which it runs and none that started before it does.

    A kernel may start before its predecessor ends, and wait for it (programmatic dependent launch). That time is the
    predecessor's.
    """
    end = float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        yield span, max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)


def busy(spans: Iterable[Span]) -> float:
    """The time in which at least one of them runs."""
    return sum(time for _, time in own_times(spans))


def describe(kernels: list[Span], calls: list[Span]) -> dict[str, float]:
    """The figures of one profile: times in ms, and numbers of calls."""
    figures = {"GPU busy, ms": busy(kernels) / 1e3, **{f"GPU: {kind}, ms": 0.0 for kind in [*KINDS, "others"]}}
    for span, own in own_times(kernels):
        figures[f"GPU: {kind_of(span.name)}, ms"] += own / 1e3
    if kernels:
        first, last = min(span.start for span in kernels), max(span.end for span in kernels)
        figures["GPU idle between kernels, ms"] = (last - first) / 1e3 - figures["GPU busy, ms"]
    for what, pattern in CALLS.items():
        found = [span for span in calls if re.search(pattern, span.name)]
        figures[f"host: {what}"] = len(found)
        figures[f"host: {what}, ms"] = busy(found) / 1e3
    return figures


class Profiler:
    """Collects the kernels and the calls of CUDA while it is open."""

    def __init__(self) -> None:
        self.figures: list[dict[str, float]] = []

    @contextmanager
    def __call__(self):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            yield
        spans = [(one.device_type, Span(one.name, one.time_range.start, one.time_range.end)) for one in found.events()]
        kernels = [span for device, span in spans if device == DeviceType.CUDA]
        calls = [span for device, span in spans if device == DeviceType.CPU and re.match("cu(da)?[A-Z]", span.name)]
        self.figures.append(describe(kernels, calls))


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Steps:
    """An engine, and the requests whose steps are measured. prompt: tokens of the prompt that joins; 0 for none."""

    def __init__(self, shape: shapes.Shape, folder: str, decoding: int, prompt: int, sampled: bool, arguments: dict):
        from vllm import LLM

        (Path(folder) / "config.json").write_text(json.dumps(shape.config))
        self.vocab_size = shape.text_config["vocab_size"]
        self.decoding, self.prompt, self.sampling = decoding, prompt, SAMPLED if sampled else GREEDY
        settings = {
            "dtype": shape.dtype, "load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False,
            "max_model_len": max(prompt, CONTEXT) + 64, "max_num_seqs": decoding + 1,
            "max_num_batched_tokens": max(8192, prompt + decoding),
        }  # fmt: skip
        self.engine = LLM(folder, **(settings | arguments)).llm_engine
        self.draw, self.count = random.Random(0), 0

    def add(self, tokens: int, max_tokens: int) -> str:
        from vllm import SamplingParams

        self.count += 1
        prompt = [self.draw.randrange(SPECIAL_IDS, self.vocab_size) for _ in range(tokens)]
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False, **self.sampling)
        self.engine.add_request(str(self.count), {"prompt_token_ids": prompt}, params)
        return str(self.count)

    def step_together(self, asked: set[str]) -> None:
        """Take steps until one gives all of these requests a token. Refuses them if one ends before."""
        most, ended = 0, False
        while most < len(asked):
            if ended:
                raise typer.BadParameter(
                    f"of {len(asked)} requests, at most {most} got a token in one step: ask for fewer, or give the "
                    "engine more room by --arguments, such as max_num_seqs or max_num_batched_tokens",
                    param_hint="--decoding",
                )
            outputs = [output for output in self.engine.step() if output.request_id in asked]
            most, ended = max(most, len(outputs)), any(output.finished for output in outputs)

    def measure(self, watch: Callable) -> float:
        """Seconds of a step, inside the context of `watch`. All requests have ended afterwards."""
        asked = {self.add(CONTEXT, 32) for _ in range(self.decoding)}
        self.step_together(asked)
        synchronise()
        with watch():
            start = time.perf_counter()
            self.step_together(asked | {self.add(self.prompt, 2)} if self.prompt else asked)
            synchronise()
            seconds = time.perf_counter() - start
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return seconds


def main(
    shape: Annotated[str, typer.Argument(help="A shape of vllm-opset bench e2e.")],
    decoding: Annotated[int, typer.Option(min=1, help="Requests that generate.")] = 64,
    prompt: Annotated[int, typer.Option(min=0, help="Tokens of the prompt that joins them.")] = 0,
    sampled: Annotated[bool, typer.Option(help="Whether tokens are drawn, with top-k and top-p.")] = False,
    repetitions: Annotated[int, typer.Option(min=1, help="Those that count.")] = 9,
    arguments: Annotated[str, typer.Option(help="Further arguments of LLM, as JSON.")] = "{}",
    to: Annotated[Path | None, typer.Option("--json", callback=writable, help="Write the figures here.")] = None,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(shapes.load(shape), folder, decoding, prompt, sampled, json.loads(arguments))
        seconds = [steps.measure(nullcontext) for _ in range(WARM_UP + repetitions)][WARM_UP:]
        profiler = Profiler()
        for _ in range(1 + repetitions):
            steps.measure(profiler)
    profiles = profiler.figures[1:]  # The first profile also starts the profiler.
    figures = {"a step, ms": 1e3 * statistics.median(seconds)}
    figures |= {name: statistics.median(one.get(name, 0.0) for one in profiles) for name in profiles[0]}
    table = Table("", os.environ.get("OPSET_PLATFORM", "auto"), title=f"{shape}: {decoding} decoding, prompt {prompt}")
    for name, value in figures.items():
        table.add_row(name, f"{value:.3f}" if name.endswith("ms") else f"{value:.0f}")
    Console().print(table)
    if to:
        to.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    typer.run(main)
