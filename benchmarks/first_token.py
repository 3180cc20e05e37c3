"""How long a lone prompt waits for its first token, by its length: both forms beside stock vLLM, on an NVIDIA GPU.

    python benchmarks/first_token.py [SHAPE [REPETITIONS]]

All engines are up together, each in a process of its own and not stopped once all have started, and one at a time is
asked. Prints the median of each in ms, with the fastest and the slowest. For a table of whole answers:
`vllm-opset bench e2e`.
"""

import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from vllm_opset.bench import shapes
from vllm_opset.bench.cases import Batch, Request
from vllm_opset.bench.compare import ComparisonPlan
from vllm_opset.bench.engines import Engine, RunningEngine

LENGTHS = (16, 128, 256, 512, 768, 1024, 2048)
WARM_UP = 3  # prompts that do not count: a process that has slept finds its caches cold
# FlashInfer's sampler compiles for minutes, and nothing is sampled here.
STOCK = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
# As many requests as the tables of docs/log/engines.md were measured with.
MANY = {"max_num_seqs": 256}
ENGINES = (
    Engine("pure", MANY, {"OPSET_PLATFORM": "cuda"}),
    Engine("native", MANY, {"OPSET_PLATFORM": "native", **STOCK}),
    Engine("stock", MANY, {"OPSET_PLATFORM": "off", **STOCK}),
)


def milliseconds(engine: RunningEngine, requests: list[Request], repetitions: int) -> list[float]:
    times = [1e3 * engine.ask(requests).seconds for _ in range(WARM_UP + repetitions)]
    return sorted(times[WARM_UP:])


def main(shape_name: str = "qwen3-8b", repetitions: int = 15) -> None:
    shape = shapes.load(shape_name)
    cases = [Batch(1, length, 1) for length in LENGTHS]
    table = Table("tokens", *(engine.name for engine in ENGINES))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        args = ComparisonPlan(shape, cases, ENGINES, repetitions, cold=False).engine_args(folder)
        (folder / "config.json").write_text(json.dumps(shape.config))
        engines = [stack.enter_context(RunningEngine(engine, args, folder)) for engine in track(ENGINES, "starting")]
        for engine in engines:
            stack.enter_context(engine.awake())
        for case in track(cases, "asking"):
            requests = case.rounds(shape.text_config["vocab_size"])[-1]
            found = [milliseconds(engine, requests, repetitions) for engine in engines]
            table.add_row(
                str(case.prompt), *(f"{statistics.median(ms):.1f} ({ms[0]:.1f} to {ms[-1]:.1f})" for ms in found)
            )
    Console().print(table)


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:]))
