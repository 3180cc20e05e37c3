"""Engines in this process."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

# An engine in the test's own process starts in a few seconds.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "OPSET_COUNT_CALLS": "1",
    "OPSET_NUM_THREADS": "1",
}
# A GPU has room for engines of other tests beside this one, and for what an engine that ended has not given back.
ON_GPU = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30}


@contextmanager
def running(path, **arguments) -> Iterator:
    """An engine for the model at `path`, in fp32 and in this process; gone afterwards."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    defaults = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 32, "seed": 0, "disable_log_stats": False}
    if torch.cuda.is_available():
        defaults |= ON_GPU
    if not (path / "tokenizer.json").exists():
        defaults["skip_tokenizer_init"] = True
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        llm = LLM(str(path), **defaults | arguments)
        try:
            yield llm
        finally:
            del llm
            gc.collect()
            cleanup_dist_env_and_memory()
