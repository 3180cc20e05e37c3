"""without_first_runner.py FOLDER [MODULE ...]: serves with vLLM's second model runner in a process without the first.

Prints the answers and the ops that ran as JSON. FOLDER is that of a model.

The process cannot import vLLM's first model runner, the sampler of that runner and the classes of its block tables. It
cannot import opset's code for vLLM's IR either. vLLM 0.33 itself still imports its IR, but every call of an IR op
raises. While the engine serves, the process cannot import any MODULE: `triton` on a device for which there is none.
Afterwards the process imports the platforms and workers for GPUs and NPUs, and those for GPUs need Triton.
"""

import importlib
import json
import sys
from pathlib import Path

HIDDEN = (
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.sample.sampler",
    "vllm_opset.model.ir",
    "vllm_opset.platform.v1",
)
REMOVED = (
    "vllm.v1.worker.block_table.BlockTable",
    "vllm.v1.worker.block_table.MultiGroupBlockTable",
    "vllm.ir.op.IrOp.dispatch",  # every call of an op goes through it
    "vllm_opset.platform.base.OpsetPlatform.import_ir_kernels",
    "vllm_opset.platform.base.OpsetPlatform.get_default_ir_op_priority",
)
ELSEWHERE = ("cuda.platform", "cuda.worker", "native.worker", "npu.platform", "npu.worker")


def hide(*modules: str) -> None:
    sys.modules |= dict.fromkeys((*HIDDEN, *modules))  # importing one of these raises ImportError
    from vllm_opset.platform.bridges import find, has

    # vLLM's second runner imports it, and it imports the classes of block tables.
    importlib.import_module("vllm.v1.worker.gpu_input_batch")
    for name in filter(lambda name: has(name)(), REMOVED):
        owner, _, attribute = name.rpartition(".")
        delattr(find(owner), attribute)


def main(folder: str, *modules: str) -> None:
    hide(*modules)  # before PyTorch, transformers and vLLM look for them
    import models
    from engines import generate, running, served, tokens

    with running(Path(folder)) as llm:
        answers = tokens(generate(llm, models.prompts(), temperature=1.5, seed=11))
        ops = sorted(served(llm))
    for module in modules:
        del sys.modules[module]
    for module in ELSEWHERE:
        importlib.import_module(f"vllm_opset.platform.{module}")
    print(json.dumps({"answers": answers, "ops": ops}))


if __name__ == "__main__":
    main(*sys.argv[1:])
