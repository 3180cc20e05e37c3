"""What a step of prefill costs in Python, without a GPU: kernels are compiled for Hopper and launched into the void.

    PYTHONPATH=tests/kernels/triton:tests/engine .venv/bin/python benchmarks/host_cost.py [TOKENS [REQUESTS]]
        [--quantization fp8]

vLLM's engine, in this process, runs a Qwen3 of 36 layers as without compiled kernels on a GPU, fused, without graphs,
but nothing is computed: neither by kernels nor by matrix products. What is missing of the host's work is what is not
Python: Triton's launcher and the driver, cuBLAS, the allocator, copies and events. Prints the time of a request for one
token, and each kernel's calls and their share of it.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Annotated

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1", "OPSET_NUM_THREADS": "1", "OPSET_PLATFORM": "cpu",
}  # fmt: skip

import torch
import triton
import typer
from compile_only import HOPPER, CompileOnly
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config

from vllm_opset import failures, selection, targets
from vllm_opset.kernel import Kernel
from vllm_opset.kernels import triton as kernels
from vllm_opset.kernels.triton import _launch
from vllm_opset.model import fusion, linear, packed_linear

LAYERS, WARM_UP = 36, 5
MULTIPROCESSORS = 132  # of an H200
VOCAB_SIZE = 500

spent: dict[str, list[float]] = {}


def launch_into_the_void() -> None:
    """Triton's kernels serve a CPU, as they are, and what would have to be computed is not."""
    triton.runtime.driver.set_active(CompileOnly())
    kernels.DEVICES = ("cpu",)
    _launch.multiprocessors = lambda device: MULTIPROCESSORS
    selection.PREFERENCE = {"cpu": ("triton",)}
    fusion._can_be_deferred = lambda *_: True
    packed_linear.bind = lambda model: linear.bind(model, compiled=False)
    torch.nn.functional.linear = lambda x, weight, bias=None: x.new_empty((*x.shape[:-1], len(weight)))
    failures.explained = timed(failures.explained)


def timed(explained: Callable) -> Callable:
    """Every chosen kernel's calls are timed."""

    def wrap(kernel: Kernel, run: Callable) -> Callable:
        inner, times = explained(kernel, run), spent.setdefault(kernel.op, [])

        def call(*args, **kwargs):
            begin = time.perf_counter()
            result = inner(*args, **kwargs)
            times.append(time.perf_counter() - begin)
            return result

        return call

    return wrap


def engine(num_tokens: int, quantization: str | None, folder: str):
    from vllm import LLM

    Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=512, num_hidden_layers=LAYERS,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, max_position_embeddings=2 * num_tokens,
        architectures=["Qwen3ForCausalLM"], dtype="bfloat16",
    ).save_pretrained(folder)  # fmt: skip
    return LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=2 * num_tokens,
        max_num_batched_tokens=2 * num_tokens, kv_cache_memory_bytes=1 << 28, enable_prefix_caching=False,
        enforce_eager=True, worker_cls="fusing_worker.FusingWorker", quantization=quantization,
    )  # fmt: skip


def main(
    num_tokens: Annotated[int, typer.Argument(help="Tokens of a prompt.")] = 1024,
    num_requests: Annotated[int, typer.Argument(help="Requests that count, one after the other.")] = 50,
    quantization: Annotated[str | None, typer.Option(help="vLLM's name, such as fp8.")] = None,
) -> None:
    """Print the time that a request for one token takes Python, and each kernel's share of it."""
    from vllm import SamplingParams

    launch_into_the_void()
    prompt = {"prompt_token_ids": [7 * i % VOCAB_SIZE for i in range(num_tokens)]}
    one_token = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    requests = []
    with tempfile.TemporaryDirectory() as folder, targets.instead(HOPPER):
        llm = engine(num_tokens, quantization, folder)
        for number in range(WARM_UP + num_requests):
            if number == WARM_UP:
                for times in spent.values():
                    times.clear()
            begin = time.perf_counter()
            llm.generate([prompt], one_token, use_tqdm=False)
            requests.append(1e3 * (time.perf_counter() - begin))
    total = statistics.median(requests[WARM_UP:])
    table = Table("what", "calls", "µs a call", "ms a request", "share")
    for op, times in sorted(spent.items(), key=lambda item: -sum(item[1])):
        if times:
            each, calls = 1e6 * statistics.median(times), len(times) / num_requests
            share = each * calls / 1e3 / total
            table.add_row(op, f"{calls:.0f}", f"{each:.1f}", f"{each * calls / 1e3:.2f}", f"{share:.0%}")
    table.add_row("all", "", "", f"{total:.2f}", "100%")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
