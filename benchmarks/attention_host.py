"""The time that Python takes for attention in a step. It needs no GPU: launches of the compiled kernels do nothing.

    OPSET_PLATFORM=cpu PYTHONPATH=tests/kernels/triton python benchmarks/attention_host.py [REPEATS [STEP ...]]

An emulation of steps of Llama-3.2-1B's shape: the metadata of a step is built, and a layer writes its cache and
attends, as between the pieces of a captured graph. It leaves out vLLM's own Python, Triton's launcher in C and the
driver. Prints the lowest times in microseconds, and how long Triton's `JITFunction.run` takes.
"""

import sys
import timeit
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
import triton
from compile_only import CompileOnly
from rich.console import Console
from rich.table import Table
from triton.runtime.jit import JITFunction

from vllm_opset import selection
from vllm_opset.kernels import triton as kernels
from vllm_opset.kernels.triton._constants import assume_unchanged

triton.runtime.driver.set_active(CompileOnly())
kernels.DEVICES = ("cpu",)
selection.PREFERENCE = {"cpu": ("triton",)}

from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402

from vllm_opset.attention.impl import OpsetAttentionImpl  # noqa: E402
from vllm_opset.attention.metadata import OpsetMetadataBuilder  # noqa: E402

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCKS = 32, 8, 64, 16, 4096
CALLS = 60
# By name: the query tokens of each request. All have CONTEXT keys before them.
CONTEXT = 500
BATCHES = {
    "decode, 1": [1],
    "decode, 64": [1] * 64,
    "64 decoded beside a prompt of 256": [1] * 64 + [256],
    "prompt of 1024": [1024],
}


def metadata(query_lens: list[int]) -> CommonAttentionMetadata:
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lens = torch.tensor([CONTEXT + length for length in query_lens], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lens,
        num_reqs=len(lens),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(query_lens),
        max_seq_len=int(lens.max()),
        block_table_tensor=torch.zeros(len(lens), 128, dtype=torch.int32),
        slot_mapping=torch.arange(int(starts[-1])),
        seq_lens_cpu_upper_bound=lens,
    )


def lowest(call: Callable[[], object], repeats: int) -> float:
    """The lowest time of a call in microseconds, which other work on the machine changes least."""
    return min(timeit.repeat(call, number=CALLS, repeat=repeats)) / CALLS * 1e6


def launches(call: Callable[[], object]) -> list[Callable[[], object]]:
    """The launches of Triton's kernels in a call."""
    found, run = [], JITFunction.run

    def record(self, *args, **kwargs):
        found.append(lambda: run(self, *args, **kwargs))
        return run(self, *args, **kwargs)

    JITFunction.run = record
    try:
        call()
    finally:
        JITFunction.run = run
    return found


def main(repeats: str = "60", *steps: str) -> None:
    torch.set_default_dtype(torch.bfloat16)
    torch.set_num_threads(1)
    impl = OpsetAttentionImpl(HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS)
    layers = {"layer": SimpleNamespace(impl=impl)}
    compilation = SimpleNamespace(static_forward_context=layers)
    config = SimpleNamespace(model_config=None, speculative_config=None, compilation_config=compilation)
    cache_spec = SimpleNamespace(dtype=torch.bfloat16, block_size=BLOCK_SIZE)
    builder = OpsetMetadataBuilder(cache_spec, list(layers), config, torch.device("cpu"))
    cache = torch.zeros(BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    table = Table("step", "metadata", "a layer", "cache write", "attention", "Triton's run: cache write", "attention")
    for name in steps or BATCHES:
        query_lens = BATCHES[name]
        common, tokens = metadata(query_lens), sum(query_lens)
        query, out = (torch.zeros(tokens, HEADS, HEAD_SIZE) for _ in range(2))
        key, value = (torch.zeros(tokens, KV_HEADS, HEAD_SIZE) for _ in range(2))
        built = builder.build(0, common)
        calls = (
            partial(builder.build, 0, common),
            partial(impl.forward, None, query, key, value, cache, built, out),
            partial(impl._write, query, key, value, cache, built.slot_mapping),
            partial(impl.attend, None, query, cache, built.batch, out),
        )
        calls[1]()  # compiles, and makes what the layers of a step share
        assume_unchanged()  # as after an engine's warm-up
        table.add_row(name, *(f"{lowest(call, int(repeats)):.1f}" for call in (*calls, *launches(calls[1]))))
    Console(width=140).print(table)


if __name__ == "__main__":
    main(*sys.argv[1:])
