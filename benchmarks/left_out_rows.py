"""How long prompts take with all rows of the last layer, and with those alone that are read, by turns in one engine.

    OPSET_PLATFORM=cuda python benchmarks/left_out_rows.py llama-3.1-8b [--case 8x8192 --case 64x1024] [--repetitions 5]

Its last layer leaves out rows in steps without CUDA graphs (`vllm_opset/model/last_layer.py`). The engine has random
weights, and answers with one token. Prints the medians, and the least and the most of all repetitions.
"""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from trace_steps import ask

from vllm_opset.bench import shapes
from vllm_opset.bench.cases import Batch
from vllm_opset.bench.compare import ComparisonPlan
from vllm_opset.bench.format import TIMES
from vllm_opset.cli.arguments import writable

WARM_UP = 1  # runs of each that do not count
REQUEST = "all rows"  # the name of a request that makes the worker compute them


class Switch:
    """A mixin for opset's worker (`worker_extension_cls`)."""

    def compute_all_rows(self, all_rows: bool) -> None:
        requests = self.read_rows.requests
        requests.add(REQUEST) if all_rows else requests.discard(REQUEST)


def text(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f} ({1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f})"


def main(
    shape: Annotated[str, typer.Argument(help="A shape of vllm-opset bench e2e.")],
    case: Annotated[list[str] | None, typer.Option(help="Requests x tokens of each.")] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Runs of each that count.")] = 5,
    arguments: Annotated[str, typer.Option(help="Further arguments of LLM, as JSON.")] = "{}",
    to: Annotated[Path | None, typer.Option("--json", callback=writable, help="Write all times here.")] = None,
) -> None:
    from vllm import LLM

    found = shapes.load(shape)
    cases = [Batch(*map(int, name.split("x")), output=1) for name in case or ("8x8192", "64x1024")]
    times: dict[str, dict[bool, list[float]]] = {of.name: {True: [], False: []} for of in cases}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(found.config))
        settings = ComparisonPlan(found, cases, (), repetitions, cold=False).engine_args(folder)
        llm = LLM(**settings | json.loads(arguments), worker_extension_cls=f"{Path(__file__).stem}.Switch")
        for of in cases:
            requests = of.rounds(found.text_config["vocab_size"])[-1]
            for _ in range(WARM_UP + repetitions):
                for all_rows, seconds in times[of.name].items():
                    llm.collective_rpc("compute_all_rows", args=(all_rows,))
                    seconds.append(ask(llm, requests))
    table = Table("case", "all rows, ms", "rows that are read, ms", "ratio", title=shape)
    for of, (every, read) in ((of, (both[True][WARM_UP:], both[False][WARM_UP:])) for of, both in times.items()):
        table.add_row(of, text(every), text(read), f"{statistics.median(read) / statistics.median(every):.3f}{TIMES}")
    Console().print(table)
    if to:
        to.write_text(json.dumps({"shape": shape, "arguments": arguments, "seconds": times}, indent=1))


if __name__ == "__main__":
    typer.run(main)
