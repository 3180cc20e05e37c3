"""One checkout's kernels behind a pipe: `two_checkouts.py` runs this file with that checkout first in PYTHONPATH.

argv[1]: the device. argv[2]: the dtype. Writes the benchmark cases of all kernels, [[op, kernel, case]]. Then it reads
one request a line, [op, kernel, case, whether to time it]. It answers with the seconds of a call. Without timing, it
calls the kernel once, and answers with null or why the kernel does not support the call.

It needs only what all commits of this project have. It times with this checkout's timing.py for any checkout.
"""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from vllm_opset import ops
from vllm_opset.bench.measure import cases, dtype_of
from vllm_opset.kernel import REFERENCE, Kernel, kernels_of
from vllm_opset.ops.contract import Op, Sample

Key = tuple[str, str, str]


def module(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found  # its dataclasses look for it
    spec.loader.exec_module(found)
    return found


TIMING = module(Path(__file__).parents[1] / "vllm_opset" / "bench" / "timing.py")


def work(device: str, dtype: torch.dtype) -> Iterator[tuple[Key, tuple[Op, Kernel, Sample]]]:
    for op in ops.ALL:
        if hasattr(op, "bench_samples"):
            kernels = [one for one in kernels_of(op.name).values() if one.provider != REFERENCE and one.runs_on(device)]
            for sample in cases(op, device, dtype_of(op, dtype), "*"):
                yield from (((op.name, kernel.name, sample.name), (op, kernel, sample)) for kernel in kernels)


def answer(op: Op, kernel: Kernel, sample: Sample, timed: bool, device: str) -> float | str | None:
    args, kwargs = sample.make()
    if timed:
        return TIMING.time_call(kernel.run, (args, kwargs), device, kernel.prepared_call).median
    problem_for = getattr(op, "problem_for", None) or op.describe  # its name in older commits
    unsupported = kernel.supports(problem_for(*args, **kwargs))
    if unsupported is None:
        kernel.call(*args, **kwargs)
    return unsupported


def main(device: str, dtype_name: str) -> None:
    dtype = getattr(torch, dtype_name)
    by_key = dict(work(device, dtype))
    print(json.dumps(list(by_key)), flush=True)
    for line in sys.stdin:
        *key, timed = json.loads(line)
        print(json.dumps(answer(*by_key[tuple(key)], timed, device)), flush=True)
        if not timed and device == "cuda":
            torch.cuda.empty_cache()  # many processes share the memory


if __name__ == "__main__":
    main(*sys.argv[1:])
