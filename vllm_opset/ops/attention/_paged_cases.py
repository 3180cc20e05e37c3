"""The cases for parity of paged_attention: every feature, the shapes of real models, and the edge cases."""

import torch

from vllm_opset.ops.attention._paged_inputs import LAYOUTS, SPLIT_KV, PagedCase

MIXED = ((1, 77), (1, 3), (19, 19), (6, 50), (0, 0), (1, 34))
# Few queries a request, as in speculative decoding. Kernels have a separate path for such batches, and one longer
# request in the batch would switch it off.
FEW = ((4, 60), (3, 20), (0, 0), (1, 31))


def _split_kv_cases() -> dict[str, dict]:
    """Cases with separate keys and values, most of them with pages of 128 tokens, a size that all such devices take."""
    mixed = {"requests": ((1, 177), (1, 3), (19, 19), (6, 150), (0, 0), (1, 134)), "block_size": 128}
    return {
        "small pages": {"requests": ((1, 77), (19, 19), (0, 0), (6, 50))},
        "decode": {"requests": ((1, 1), (1, 128), (1, 129), (1, 300)), "block_size": 128},
        "prefill": {"requests": ((5, 5), (128, 128), (150, 150)), "block_size": 128},
        "chunked prefill": {"requests": ((7, 140), (20, 152)), "block_size": 128, "loose_bounds": True},
        "mixed, padded rows and requests": mixed | {"padded_rows": 3},
        "zero tokens": {"requests": ((0, 0), (0, 0)), "block_size": 128, "padded_rows": 3},
        "MHA": mixed | {"num_kv_heads": 4},
        "MQA": mixed | {"num_kv_heads": 1},
        "GQA, 7 heads a group": mixed | {"num_heads": 14},
        "head size 128": mixed | {"head_size": 128},
        "shared pages": mixed | {"requests": ((1, 140), (5, 160), (1, 133)), "shared_pages": 1},
        "far apart scores": mixed | {"query_std": 20.0},
        "window of 1": mixed | {"window": 1},
        "window": mixed | {"window": 20},
        "window, freed pages": mixed | {"window": 20, "requests": ((1, 300), (3, 200), (9, 9))},
        "window as a pair": mixed | {"window": (19, 0)},
        "window wider than any sequence": mixed | {"window": 500},
    }


CASES: dict[str, PagedCase] = {
    "zero tokens": PagedCase(((0, 0), (0, 0)), padded_rows=3),
    "zero tokens, loose bounds": PagedCase(((0, 0), (0, 0)), num_heads=2, padded_rows=3, loose_bounds=True),
    "one token": PagedCase(((1, 1),)),
    "decode": PagedCase(((1, 1), (1, 16), (1, 17), (1, 100), (1, 33))),
    "decode, one length": PagedCase(((1, 40),) * 3),
    "decode, long": PagedCase(((1, 1000), (1, 700))),
    "prefill": PagedCase(((5, 5), (16, 16), (33, 33))),
    "prefill, long": PagedCase(((300, 300),), num_heads=2, num_kv_heads=1),
    "chunked prefill": PagedCase(((7, 40), (20, 52))),
    # The first query sees all keys of a block of 64 except the last.
    "chunk that begins one key before the end of a block": PagedCase(((70, 132),), num_heads=1, num_kv_heads=1),
    # More keys than any kernel attends without splitting them.
    "chunk over a long context": PagedCase(((70, 1100),), num_heads=1, num_kv_heads=1),
    "chunk over a long context, window, sinks": PagedCase(
        ((70, 700),), num_heads=1, num_kv_heads=1, window=600, sinks=True, padded_rows=5
    ),
    "a few queries over a long context": PagedCase(((20, 700), (1, 300))),
    "speculative verification": PagedCase(((4, 60), (3, 20), (5, 5), (1, 31), (4, 44))),
    "few queries": PagedCase(FEW),
    "few queries, window, sinks": PagedCase(FEW, window=20, sinks=True),
    "few queries, soft cap, ALiBi": PagedCase(FEW, soft_cap=1.5, alibi=True),
    "mixed": PagedCase(MIXED),
    "padded rows and requests, loose bounds": PagedCase(((1, 20), (3, 9), (0, 0)), padded_rows=5, loose_bounds=True),
    "MHA": PagedCase(MIXED, num_kv_heads=4),
    "MQA": PagedCase(MIXED, num_kv_heads=1),
    "GQA, 7 heads a group": PagedCase(MIXED, num_heads=14),
    "shared pages": PagedCase(((1, 40), (5, 60), (1, 33)), shared_pages=2),
    "far apart scores": PagedCase(MIXED, query_std=20.0),
    "window of 1": PagedCase(MIXED, window=1),
    "window, freed pages": PagedCase(MIXED, window=20),
    "window as a pair": PagedCase(MIXED, window=(19, 0)),
    "window wider than any sequence": PagedCase(MIXED, window=500),
    "window, long prefill": PagedCase(((300, 300), (1, 90)), num_heads=2, num_kv_heads=1, window=40),
    "soft cap": PagedCase(MIXED, soft_cap=1.5, query_std=2.0),
    "soft cap, window": PagedCase(MIXED, soft_cap=1.5, window=20),
    "soft cap, long prefill": PagedCase(((300, 300),), num_heads=2, num_kv_heads=1, soft_cap=1.5),
    "ALiBi": PagedCase(MIXED, alibi=True),
    "ALiBi, window, soft cap": PagedCase(MIXED, alibi=True, window=20, soft_cap=1.5),
    "ALiBi, non-causal": PagedCase(((9, 9), (2, 30)), alibi=True, causal=False),
    "sinks": PagedCase(MIXED, sinks=True),
    "sinks, window": PagedCase(MIXED, sinks=True, window=20),
    "sinks, ALiBi, MHA": PagedCase(MIXED, sinks=True, alibi=True, num_kv_heads=4),
    "non-causal": PagedCase(((9, 9), (33, 33), (1, 1)), causal=False),
    "non-causal, long": PagedCase(((300, 300),), num_heads=2, num_kv_heads=1, causal=False),
    "non-causal, window": PagedCase(((9, 9), (33, 33)), causal=False, window=(5, 3)),
    "non-causal, long, window": PagedCase(((300, 300),), num_heads=1, num_kv_heads=1, causal=False, window=(20, 50)),
    "non-causal, window on the right": PagedCase(((9, 20), (33, 33)), causal=False, window=(-1, 3)),
    # As the tokens of images attend, whose prompts have other tokens before.
    "non-causal, after other keys": PagedCase(((16, 90), (9, 20), (30, 33)), causal=False),
    "non-causal, after other keys, window on the left": PagedCase(
        ((16, 90), (9, 20), (30, 33)), causal=False, window=(40, -1)
    ),
    "cross attention": PagedCase(((3, 40), (6, 2), (1, 19)), causal=False),
    "cross attention to nothing": PagedCase(((2, 0), (1, 5), (2, 7)), causal=False),
    "cross attention to nothing at all": PagedCase(((9, 0), (2, 0)), causal=False),
    "fp8 cache": PagedCase(MIXED, cache_dtype=torch.float8_e4m3fn),
    **{
        f"fp8 cache, long prefill, head size {size}": PagedCase(
            ((70, 90),), num_heads=2, num_kv_heads=1, head_size=size, cache_dtype=torch.float8_e4m3fn
        )
        for size in (64, 256)
    },
    "fp8 cache, window, soft cap": PagedCase(MIXED, cache_dtype=torch.float8_e4m3fn, window=20, soft_cap=1.5),
    **{f"head size {size}": PagedCase(MIXED, head_size=size) for size in (8, 80, 96, 112, 120, 128, 192, 256)},
    **{f"block size {size}": PagedCase(MIXED, block_size=size, window=40) for size in (32, 48, 64, 80, 128)},
    **{f"{SPLIT_KV}, {name}": PagedCase(layout=SPLIT_KV, **case) for name, case in _split_kv_cases().items()},
    **{layout: PagedCase(MIXED, layout=layout, padded_rows=2) for layout in LAYOUTS},
}
