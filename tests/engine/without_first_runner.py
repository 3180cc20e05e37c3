"""Serves with vLLM's second model runner in a process that cannot import the first one. Prints the answers as JSON.

The workers for GPUs are imported there too. Its argument is the folder of a model.
"""

import importlib
import json
import sys
from pathlib import Path

import models
from engines import generate, running, tokens

WORKERS_FOR_GPUS = ("vllm_opset.platform.cuda.worker", "vllm_opset.platform.native.worker")
HIDDEN = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.cpu_model_runner", "vllm.v1.sample.sampler")


def main() -> None:
    sys.modules |= dict.fromkeys((*HIDDEN, "vllm_opset.model.v1"))  # importing one of these raises ImportError
    for worker in WORKERS_FOR_GPUS:
        importlib.import_module(worker)
    with running(Path(sys.argv[1])) as llm:
        print(json.dumps(tokens(generate(llm, models.prompts(), temperature=1.5, seed=11))))


if __name__ == "__main__":
    main()
