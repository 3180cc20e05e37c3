"""Serves with vLLM's second model runner in a process without the first one. Prints answers and ops that ran as JSON.

The platforms and workers for GPUs and NPUs are imported there too. The argument is the folder of a model.

The process cannot import vLLM's first model runner, the sampler of that runner and the classes of its block tables. It
cannot import opset's code for vLLM's IR either. vLLM 0.33 itself still needs its IR.
"""

import importlib
import json
import sys
from pathlib import Path

import models
from engines import generate, running, served, tokens
from vllm.v1.worker import block_table

from vllm_opset.platform.base import OpsetPlatform

HIDDEN = (
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.sample.sampler",
    "vllm_opset.model.ir",
    "vllm_opset.model.v1",
    "vllm_opset.platform.npu.v1",
)
ELSEWHERE = ("cuda.platform", "cuda.worker", "native.worker", "npu.platform", "npu.worker")


def hide() -> None:
    sys.modules |= dict.fromkeys(HIDDEN)  # importing one of these raises ImportError
    importlib.import_module("vllm.v1.worker.gpu_input_batch")  # vLLM's second runner imports it, and it these classes
    del block_table.BlockTable, block_table.MultiGroupBlockTable
    del OpsetPlatform.import_ir_kernels, OpsetPlatform.get_default_ir_op_priority


def main() -> None:
    hide()
    for module in ELSEWHERE:
        importlib.import_module(f"vllm_opset.platform.{module}")
    with running(Path(sys.argv[1])) as llm:
        answers = tokens(generate(llm, models.prompts(), temperature=1.5, seed=11))
        print(json.dumps({"answers": answers, "ops": sorted(served(llm))}))


if __name__ == "__main__":
    main()
