"""Random problems of paged_attention: head layouts of many models, pages, ragged lengths and windows."""

import random
from dataclasses import dataclass
from functools import partial

import torch

from vllm_opset.ops._draws import log_uniform
from vllm_opset.ops.attention._paged_inputs import PagedCase, _bench_inputs
from vllm_opset.ops.contract import Sample

# Query heads and KV heads, of models from 0.5 to 120 billion parameters.
HEADS = ((32, 8), (28, 4), (64, 8), (40, 8), (12, 2), (32, 32), (16, 8), (14, 2), (24, 8), (32, 4), (8, 1))
HEAD_SIZES = (64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32, 64)
KINDS = ("decode", "verify", "mixed", "prefill")
VERIFIED = (2, 8)  # queries of a request whose drafts are verified
WINDOWED = 0.25  # the share of problems with a window


@dataclass(frozen=True)
class Load:
    """What a device computes in a moment: the most requests, tokens of a request, queries of a step and cache elements.

    prefills: the most requests with many queries each.
    """

    requests: int
    tokens: int
    queries: int
    elements: int
    prefills: int


LOADS = {"cuda": Load(256, 65536, 8192, 2**31, 16), "cpu": Load(16, 2048, 256, 2**23, 4)}


def draw(device: str, dtype: torch.dtype, choices: random.Random) -> Sample:
    """One batch. `choices` makes all decisions but for the values of the tensors."""
    load = LOADS["cpu" if device == "cpu" else "cuda"]
    kind, (num_heads, num_kv_heads) = choices.choice(KINDS), choices.choice(HEADS)
    head_size, block_size = choices.choice(HEAD_SIZES), choices.choice(BLOCK_SIZES)
    count = log_uniform(choices, 1, load.prefills if kind == "prefill" else load.requests)
    longest = min(load.tokens, load.elements // (2 * num_kv_heads * head_size * count))
    seq_lens = [log_uniform(choices, 1, longest) for _ in range(count)]
    requests = list(zip(_query_lens(kind, seq_lens, load, choices), seq_lens, strict=True))
    window = log_uniform(choices, 16, max(seq_lens) + 16) if choices.random() < WINDOWED else None
    case = PagedCase(requests, num_heads, num_kv_heads, head_size, block_size, window)
    name = (
        f"{kind} B{count} q{max(query_len for query_len, _ in requests)} ctx{min(seq_lens)} to {max(seq_lens)} "
        f"H{num_heads}/{num_kv_heads} D{head_size} page{block_size}{f' swa{window}' if window else ''}"
    )
    return Sample(name, partial(_bench_inputs, case, device, dtype), case.output_scale())


def _query_lens(kind: str, seq_lens: list[int], load: Load, choices: random.Random) -> list[int]:
    """The number of queries of each request, none above its tokens."""
    most = max(1, load.queries // len(seq_lens))
    if kind == "verify":
        drafted = choices.randint(*VERIFIED)
        return [min(drafted, seq_len) for seq_len in seq_lens]
    if kind == "prefill":
        return [log_uniform(choices, 1, min(most, seq_len)) for seq_len in seq_lens]
    query_lens = [1] * len(seq_lens)
    if kind == "mixed":
        chunk = choices.randrange(len(seq_lens))
        query_lens[chunk] = log_uniform(choices, 1, min(load.queries, seq_lens[chunk]))
    return query_lens
