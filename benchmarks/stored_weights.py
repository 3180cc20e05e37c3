"""The time of products with quantised weights in C++: dequantised once, and as they are stored. One thread.

    python benchmarks/stored_weights.py experts bfloat16
    CXX="g++ -mno-avx512f" python benchmarks/stored_weights.py linear float32

Weights come from memory: calls go through layers, or experts, that together are larger than the caches.
"""

import argparse
import time

import torch

from vllm_opset.kernel import kernels_of
from vllm_opset.kernels.cpu import fused_experts as experts_in_torch
from vllm_opset.ops.gemm._packed import random_weight
from vllm_opset.ops.moe._quantised import int4_experts, rounded_experts
from vllm_opset.ops.schemes import FP4, FP8, INT8, MXFP4, PER_ROW, PER_TENSOR, GroupShape, dequantise, scales_of, stored

BLOCK = GroupShape(128, 128)
FORMATS = {
    "fp8 per tensor": (FP8, PER_TENSOR),
    "fp8 per channel": (FP8, PER_ROW),
    "fp8 by blocks": (FP8, BLOCK),
    "int8 per channel": (INT8, PER_ROW),
    "int4, 128, zero points": ("int4", 128),
    "int4, 32": ("int4", 32),
    "mxfp4": (FP4, MXFP4.group),
}
TOKENS = (1, 4, 16, 64)
LAYERS, SIZE = 8, 4096
EXPERTS, TOP_K, HIDDEN, WIDTH = 16, 4, 1024, 1024


def linear_calls(to, group, dtype: torch.dtype):
    """For each form of the weight, a function of the number of tokens that multiplies by all layers; bytes of each."""
    rng, run = torch.Generator().manual_seed(0), kernels_of("linear")["cpp"]
    given = []
    for _ in range(LAYERS):
        if to == "int4":
            weight, scale, zeros = random_weight(SIZE, SIZE, group, dtype, "cpu", rng, group == 128)
        else:
            values = torch.randn(SIZE, SIZE, generator=rng) / 64
            scale, zeros = scales_of(values, to, group), None
            weight = stored(values, scale, to)
        given.append((weight, scale, zeros))
    how = [
        {"weight_scale": s, "out_dtype": dtype} | ({} if z is None else {"weight_zero_point": z}) for _, s, z in given
    ]
    kept = [run.prepared("weight", weight, **one) for (weight, *_), one in zip(given, how, strict=True)]
    plain = [run.prepared("weight", dequantise(weight, scale, dtype, zeros)) for weight, scale, zeros in given]
    x = torch.randn(max(TOKENS), SIZE, generator=rng).to(dtype)

    def once(tokens):
        for weight in plain:
            run.run(x[:tokens], weight)

    def as_stored(tokens):
        for weight, one in zip(kept, how, strict=True):
            run.run(x[:tokens], weight, **one)

    return once, as_stored, sum(w.nbytes for w in plain), sum(w.nbytes for w in kept)


def experts_calls(to, group, dtype: torch.dtype):
    rng, run = torch.Generator().manual_seed(0), kernels_of("fused_experts")["cpp"]
    given = {}
    for name, shape in (("w1", (EXPERTS, 2 * WIDTH, HIDDEN)), ("w2", (EXPERTS, HIDDEN, WIDTH))):
        values = (torch.randn(shape, generator=rng) / 32).to(dtype)
        made = (
            int4_experts(values, group, group == 128, rng)
            if to == "int4"
            else (*rounded_experts(values, group, to), None)
        )
        given |= {
            name + part: one for part, one in zip(("", "_scale", "_zero_point"), made, strict=True) if one is not None
        }
    how = {name: value for name, value in given.items() if name not in ("w1", "w2")} | {"out_dtype": dtype}
    kept = [run.prepared(name, given[name], **how) for name in ("w1", "w2")]
    plain = [experts_in_torch.dequantised_w1(given["w1"], **how), experts_in_torch.dequantised_w2(given["w2"], **how)]
    x, weights = torch.randn(max(TOKENS), HIDDEN, generator=rng).to(dtype), torch.full((max(TOKENS), TOP_K), 0.25)
    # One token takes four experts a call, and four calls take all.
    ids = [((torch.arange(TOP_K) + TOP_K * call) % EXPERTS).expand(max(TOKENS), -1) for call in range(EXPERTS // TOP_K)]
    ids = [((own + TOP_K * torch.arange(max(TOKENS))[:, None]) % EXPERTS).int().contiguous() for own in ids]

    def with_weights(pair, **how):
        def call(tokens):
            for own in ids:
                run.run(x[:tokens], *pair, weights[:tokens], own[:tokens], **how)

        return call

    nbytes = [sum(w.nbytes for w in pair) for pair in (plain, kept)]
    return with_weights(plain), with_weights(kept, **how), *nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", choices=("linear", "experts"))
    parser.add_argument("dtype", choices=("bfloat16", "float32"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", default="", help="formats whose names contain this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    calls = {"linear": linear_calls, "experts": experts_calls}[arguments.op]
    for name, how in FORMATS.items():
        if arguments.only not in name or (arguments.op == "linear" and how[0] is FP4):
            continue
        *both, plain_bytes, kept_bytes = calls(*how, getattr(torch, arguments.dtype))
        for tokens in TOKENS:
            least = [float("inf")] * 2
            for _ in range(arguments.rounds):
                for which, call in enumerate(both):
                    begin = time.perf_counter()
                    call(tokens)
                    least[which] = min(least[which], time.perf_counter() - begin)
            once, as_stored = least
            reads = 4 if arguments.op == "experts" and tokens >= 4 else 1  # four calls, each of all experts
            print(
                f"{arguments.op} {arguments.dtype} {name:24} {tokens:3} tokens: once {once * 1e3:7.2f} ms, "
                f"{reads * plain_bytes / once / 1e9:5.1f} GB/s; stored {as_stored * 1e3:7.2f} ms, "
                f"{reads * kept_bytes / as_stored / 1e9:5.1f} GB/s; {once / as_stored:.2f}x",
                flush=True,
            )


if __name__ == "__main__":
    main()
