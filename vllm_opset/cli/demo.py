"""`vllm-opset demo`: vLLM's engine answers real questions with this plugin's kernels."""

import importlib.metadata
import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from vllm_opset.cli.arguments import DTYPES, known
from vllm_opset.cli.show import print_table
from vllm_opset.platform import PluginError, stock

QUESTIONS = "heldout.jsonl"
IN_CHECKOUT = Path(__file__).parents[2] / "examples" / "tiny-qwen3"
SAMPLING = {"temperature": 0.5, "top_k": 20, "top_p": 0.95, "min_p": 0.02, "seed": 7, "repetition_penalty": 1.01}


def answer(
    model: Annotated[
        Path | None, typer.Option(help="A model folder with its held-out questions, instead of tiny-qwen3.")
    ] = None,
    questions: Annotated[int, typer.Option(min=1, help="How many questions to ask, at most.")] = 20,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "float32",
    verbose: Annotated[bool, typer.Option(help="Show vLLM's own log.")] = False,
) -> None:
    """Ask the tiny model questions it has not seen, and show which kernel served which op."""
    known(dtype, DTYPES, "--dtype")
    if not stock.installed():
        raise typer.BadParameter("vLLM is not installed: install it; the README shows how for a CPU")
    model = model or _tiny()
    if not (model / QUESTIONS).exists():
        raise typer.BadParameter(
            f"{model} has no {QUESTIONS}; in a clone of the project, give examples/tiny-qwen3", param_hint="--model"
        )
    held_out = [json.loads(line) for line in (model / QUESTIONS).read_text().splitlines()]
    os.environ["OPSET_COUNT_CALLS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if verbose else "ERROR")
    asked = random.Random(0).sample(held_out, min(questions, len(held_out)))
    started = time.perf_counter()
    try:
        llm = _load(model, dtype, verbose)
    except PluginError as error:
        message = f"{error} `vllm-opset doctor` shows this machine."
        raise typer.BadParameter(message, param_hint="environment") from error
    ready = time.perf_counter()
    outputs = llm.chat([task["messages"] for task in asked], _sampling(len(asked)), use_tqdm=False)
    seconds = time.perf_counter() - ready
    _print_answers(asked, outputs)
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    rate = f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s"
    print(f"Engine ready in {ready - started:.1f} s; {rate}\n")
    if llm.llm_engine.vllm_config.parallel_config.worker_cls.startswith("vllm_opset."):
        print_table("Which kernel served which op", ("op", "kernel", "calls", "reason"), _by_op(llm))
    else:
        print("vLLM's own kernels served every op; `vllm-opset doctor` says why.")


def _tiny() -> Path:
    """The project's model, from the checkout or from its installed copy."""
    if IN_CHECKOUT.is_dir():
        return IN_CHECKOUT
    files = importlib.metadata.files("vllm-opset") or ()
    return next((Path(file.locate()).parent for file in files if file.name == QUESTIONS), IN_CHECKOUT)


def _load(model: Path, dtype: str, verbose: bool):
    from vllm import LLM

    limits = {"max_model_len": 512, "kv_cache_memory_bytes": 64 << 20}
    return LLM(model=str(model), dtype=dtype, use_tqdm_on_load=verbose, **limits)


def _sampling(count: int) -> list:
    """The sampling parameters of each question: every fourth one uses every option, the others are greedy."""
    from vllm import SamplingParams

    greedy, sampled = SamplingParams(temperature=0.0, max_tokens=64), SamplingParams(**SAMPLING, max_tokens=64)
    return [sampled if i % 4 == 3 else greedy for i in range(count)]


def _print_answers(asked: list[dict], outputs: list) -> None:
    rows = []
    for task, output in zip(asked, outputs, strict=True):
        text = output.outputs[0].text.strip()
        rows.append(
            {"question": task["messages"][-1]["content"], "answer": text, "": "✓" if text == task["answer"] else "✗"}
        )
    print_table("Questions the model has not seen", ("question", "answer", ""), rows)
    print(f"{sum(row[''] == '✓' for row in rows)} of {len(rows)} right")


def _by_op(llm) -> list[dict]:
    """The engine's report, with calls summed over the layers of the first worker."""
    rows: dict[tuple, dict] = {}
    for choice in llm.collective_rpc("opset_report")[0]:
        row = rows.setdefault((choice["op"], choice["kernel"]), {**choice, "calls": 0, "variants": Counter()})
        row["calls"] += choice["calls"]
        row["variants"].update(choice["variants"])
    return [{**row, "calls": _with_variants(row["calls"], row["variants"])} for row in rows.values()]


def _with_variants(calls: int, variants: Counter) -> str:
    by_variant = ", ".join(f"{name} {number}" for name, number in sorted(variants.items()))
    return f"{calls} ({by_variant})" if by_variant else str(calls)
