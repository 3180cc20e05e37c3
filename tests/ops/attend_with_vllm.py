"""Runs vLLM's own Triton attention in the interpreter, next to the reference. Prints the largest differences as JSON.

The benchmarks' peer calls it. This is a program of its own, because Triton chooses the interpreter when it is imported.
"""

import dataclasses
import json
import os

os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OPSET_PLATFORM": "off"}

import torch

from vllm_opset import ops
from vllm_opset.bench.peers import vllm_triton
from vllm_opset.ops.attention._paged_inputs import PagedCase

DECODED = ((1, 77), (1, 3), (1, 300))  # whose keys are split
REQUESTS = ((1, 77), (1, 3), (6, 19), (3, 50), (1, 34))
# Without a window that is not causal: with several query rows in a tile, vLLM 0.26 to 0.33 drop values that later rows
# see.
CASES = {
    "plain": PagedCase(REQUESTS),
    "decode": PagedCase(DECODED),
    "decode, window": PagedCase(DECODED, window=20),
    "window": PagedCase(REQUESTS, window=20),
    "soft cap": PagedCase(REQUESTS, soft_cap=1.5),
    "ALiBi": PagedCase(REQUESTS, alibi=True),
    "ALiBi, soft cap": PagedCase(REQUESTS, alibi=True, soft_cap=1.5),
    "sinks": PagedCase(REQUESTS, sinks=True),
    "sinks, window": PagedCase(REQUESTS, sinks=True, window=20),
    "non-causal": PagedCase(REQUESTS, causal=False),
    "non-causal, ALiBi": PagedCase(REQUESTS, causal=False, alibi=True),
}


def difference(name: str, case: PagedCase) -> float:
    (query, kv_cache, batch, ours), options = case.make(name, "cpu", torch.float32)
    theirs = ours.clone()
    ops.paged_attention(query, kv_cache, batch, ours, **options)
    # vLLM reads pages past the end of a sequence and masks their contents, so these pages must exist.
    existing = dataclasses.replace(batch, block_table=batch.block_table.clamp(max=len(kv_cache) - 1))
    vllm_triton.paged_attention(query, kv_cache, existing, theirs, **options)
    return (ours - theirs).abs().max().item()


if __name__ == "__main__":
    print(json.dumps({name: difference(name, case) for name, case in CASES.items()}))
