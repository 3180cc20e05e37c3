"""timing.py [DEVICE]: the time of each Ascend kernel, call after call, beside its op's reference on the same device.

Never run on hardware. It measures the wall-clock time of many calls in a row, which is the longer of host and device
time. It makes no claim about caches. Prints one line of JSON: rows of op, kernel, case and microseconds.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator

import torch
from probes import kernels

from vllm_opset import ops
from vllm_opset.ops.attention._paged_inputs import SPLIT_KV, PagedCase
from vllm_opset.ops.contract import Op, Sample

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SECONDS = 0.2  # spent on one case
BLOCK = {"layout": SPLIT_KV, "block_size": 128, "head_size": 128, "num_heads": 32, "num_kv_heads": 8}
ATTENTION = {
    "decode B1 ctx1024": PagedCase(((1, 1024),), **BLOCK),
    "decode B64 ctx1024": PagedCase(((1, 1024),) * 64, **BLOCK),
    "prefill B1 S1024": PagedCase(((1024, 1024),), **BLOCK),
}


def real_sizes(op: Op, device: str, dtype: torch.dtype) -> Iterator[Sample]:
    """Problem sizes of models. For the cache's op, only the contract's samples have the split KV layout."""
    if op is ops.paged_attention:
        yield from (case.sample(name, device, dtype) for name, case in ATTENTION.items())
    elif op is ops.reshape_and_cache:
        yield from (sample for sample in op.samples(device, dtype) if SPLIT_KV in sample.name)
    elif hasattr(op, "bench_samples"):
        yield from op.bench_samples(device, dtype)


def rows(device: str, samples: Callable[[Op, str, torch.dtype], Iterator[Sample]] = real_sizes) -> Iterator[dict]:
    for kernel in kernels():
        op = ops.BY_NAME[kernel.op]
        for dtype in (dtype for dtype in DTYPES if dtype in op.dtypes):
            known = ((sample.name, *sample.make()) for sample in samples(op, device, dtype))
            timed = [
                {"case": name, "us": microseconds(kernel.call, args, kwargs, device)}
                | {"reference_us": microseconds(op.reference, args, kwargs, device)}
                for name, args, kwargs in known
                if kernel.supports(op.problem_for(*args, **kwargs)) is None
            ]
            if timed:
                yield from ({"op": op.name, "kernel": kernel.name, "dtype": str(dtype)} | row for row in timed)
                break


def microseconds(run: Callable, args: tuple, kwargs: dict, device: str) -> float:
    wait = torch.npu.synchronize if device == "npu" else lambda: None
    run(*args, **kwargs)
    wait()
    calls, started = 0, time.perf_counter()
    while not calls or time.perf_counter() - started < SECONDS:
        run(*args, **kwargs)
        calls += 1
    wait()
    return (time.perf_counter() - started) / calls * 1e6


if __name__ == "__main__":
    print(json.dumps(list(rows((sys.argv[1:] or ["npu"])[0]))))
