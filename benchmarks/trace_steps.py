"""Shows in which steps of an engine the time of a trace goes, by the tokens of a step.

    OPSET_PLATFORM=off python benchmarks/trace_steps.py llama-3.2-1b [--repetitions 7]

The engine has random weights and a process of its own, and OPSET_PLATFORM decides on its form. It answers the trace of
`vllm-opset bench e2e`. Its worker notes three times of each step: until the next one begins, in which
Python launches and samples, and on the GPU, from the model's first launch to the sampler's last one. Prints the run
with the median time, and the times of all.
"""

import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table

from vllm_opset.bench import shapes
from vllm_opset.bench.cases import Request, Trace
from vllm_opset.bench.compare import ComparisonPlan
from vllm_opset.cli.arguments import writable

WARM_UP = 2  # runs that do not count
# The most tokens of a step of each kind, beside steps with one token of each request.
MOST_TOKENS = (512, 2048, 4096)
DECODE, LONGER = "one token of each request", f"more than {MOST_TOKENS[-1]:,} tokens"


class Step(NamedTuple):
    """A step of a worker. lasted: seconds until the next step began, 0 for the last one of a run.

    python: seconds in which Python launched and sampled. gpu: seconds on the GPU, 0 on other devices.
    """

    tokens: int
    requests: int
    lasted: float
    python: float
    gpu: float

    @property
    def kind(self) -> str:
        if self.tokens == self.requests:
            return DECODE
        most = next((most for most in MOST_TOKENS if self.tokens <= most), None)
        return f"up to {most:,} tokens" if most else LONGER


class Notes:
    """A mixin for vLLM's worker (`worker_extension_cls`), which notes its steps."""

    def note_steps(self) -> None:
        self.noted, execute_model, sample_tokens = [], self.execute_model, self.sample_tokens

        def noted_execute_model(scheduled, *args, **kwargs):
            note = {"scheduled": scheduled, "begin": time.perf_counter(), "events": [_event()]}
            result = execute_model(scheduled, *args, **kwargs)
            note["python"] = time.perf_counter() - note["begin"]
            if scheduled.total_num_scheduled_tokens:
                self.noted.append(note)
            return result

        def noted_sample_tokens(*args, **kwargs):
            begin, note = time.perf_counter(), self.noted[-1]
            result = sample_tokens(*args, **kwargs)
            note["python"] += time.perf_counter() - begin
            note["events"].append(_event())
            return result

        self.execute_model, self.sample_tokens = noted_execute_model, noted_sample_tokens

    def steps(self) -> list[tuple]:
        """Those since the last call, as `Step`."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        noted = self.noted.copy()
        self.noted.clear()
        ends = [*(note["begin"] for note in noted[1:]), noted[-1]["begin"]]
        return [
            (
                note["scheduled"].total_num_scheduled_tokens,
                len(note["scheduled"].num_scheduled_tokens),
                end - note["begin"],
                note["python"],
                note["events"][0].elapsed_time(note["events"][-1]) / 1e3 if note["events"][0] else 0.0,
            )
            for note, end in zip(noted, ends, strict=True)
        ]


def _event() -> torch.cuda.Event | None:
    if not torch.cuda.is_available():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def ask(llm, requests: Sequence[Request]) -> float:
    """Seconds until all requests are answered."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": request.prompt} for request in requests]
    sampling = [
        SamplingParams(max_tokens=request.max_tokens, ignore_eos=True, detokenize=False, **request.sampling)
        for request in requests
    ]
    begin = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - begin


def by_kind(steps: Sequence[Step]) -> Iterator[tuple[str, list[Step]]]:
    for kind in (DECODE, *(f"up to {most:,} tokens" for most in MOST_TOKENS), LONGER):
        found = [step for step in steps if step.kind == kind]
        if found:
            yield kind, found


def summary(steps: Sequence[Step]) -> dict[str, float]:
    """Sums over these steps."""
    return {
        "steps": len(steps),
        "tokens": sum(step.tokens for step in steps),
        "lasted, s": sum(step.lasted for step in steps),
        "Python, s": sum(step.python for step in steps),
        "GPU, s": sum(step.gpu for step in steps),
    }


def main(
    shape: Annotated[str, typer.Argument(help="A shape of vllm-opset bench e2e.")],
    repetitions: Annotated[int, typer.Option(min=1, help="Runs that count.")] = 7,
    arguments: Annotated[str, typer.Option(help="Further arguments of LLM, as JSON.")] = "{}",
    to: Annotated[Path | None, typer.Option("--json", callback=writable, help="Write sums of all runs here.")] = None,
) -> None:
    from vllm import LLM

    found = shapes.load(shape)
    (trace,) = (case for case in found.cases if isinstance(case, Trace))
    _, requests = trace.rounds(found.text_config["vocab_size"])
    runs = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(found.config))
        settings = ComparisonPlan(found, [trace], (), repetitions, cold=False).engine_args(folder) | {
            "max_num_seqs": 256
        }
        llm = LLM(**settings | json.loads(arguments), worker_extension_cls=f"{Path(__file__).stem}.Notes")
        llm.collective_rpc("note_steps")
        for _ in range(WARM_UP + repetitions):
            seconds = ask(llm, requests)
            steps, *_ = llm.collective_rpc("steps")
            runs.append((seconds, [Step(*step) for step in steps]))
    runs = runs[WARM_UP:]
    seconds, steps = sorted(runs)[len(runs) // 2]
    table = Table("steps with", *summary(steps), title=f"{shape}: a run of {seconds:.3f} s")
    for kind, of_kind in [*by_kind(steps), ("all", steps)]:
        number, tokens, *times = summary(of_kind).values()
        table.add_row(kind, f"{number:,}", f"{tokens:,}", *(f"{value:.3f}" for value in times))
    Console().print(table)
    Console().print("All runs, s:", ", ".join(f"{seconds:.3f}" for seconds, _ in runs))
    if to:
        platform = os.environ.get("OPSET_PLATFORM", "auto")
        sums = [{"seconds": seconds, **{kind: summary(of) for kind, of in by_kind(steps)}} for seconds, steps in runs]
        settings = {"shape": shape, "platform": platform, "arguments": arguments}
        to.write_text(json.dumps({**settings, "runs": sums}, indent=1))


if __name__ == "__main__":
    typer.run(main)
