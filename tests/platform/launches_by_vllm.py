"""Run as a program, it launches vLLM's own kernels in Triton's interpreter, and saves what they wrote.

Its argument names the file.
"""

import os
import sys
from types import SimpleNamespace

import torch
from launches import LAUNCHES, launches
from launches._launch import WORKER

from vllm_opset.platform.bridges import find, has
from vllm_opset.platform.runner_kernels import parameters


def main() -> None:
    from vllm.triton_utils import HAS_TRITON

    assert HAS_TRITON and os.environ["TRITON_INTERPRET"] == "1"
    # The interpreter has no functions of CUDA's library.
    find(f"{WORKER}gpu.metrics.logits").libdevice = SimpleNamespace(isnan=lambda scores: scores != scores)
    results = {}
    for name in filter(lambda name: has(name)(), LAUNCHES):
        kernel = find(name)
        results[name] = [launch.run(kernel, parameters(kernel)) for launch in launches(name)]
    torch.save(results, sys.argv[1])


if __name__ == "__main__":
    main()
