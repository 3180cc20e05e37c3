"""Engines in this process, the requests of the tests, and the engines' answers."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

# With these, an engine in the test's own process starts in a few seconds.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "OPSET_COUNT_CALLS": "1",
    "OPSET_NUM_THREADS": "1",
}
# The GPU also holds engines of other tests, and memory that an ended engine has not returned yet.
ON_GPU = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30}
NUM_TOKENS = 32


@contextmanager
def running(path, **arguments) -> Iterator:
    """An engine for the model at `path`, in fp32 and in this process; it is shut down afterwards."""
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
        # vLLM collects garbage five times for an engine, which takes 0.4 s each. Once at its end is enough.
        collect = gc.collect
        patch.setattr(gc, "collect", lambda *_: 0)
        dtype, llm = torch.get_default_dtype(), None
        try:
            llm = LLM(str(path), **defaults | arguments)
            yield llm
        finally:
            torch.set_default_dtype(dtype)  # vLLM 0.26 leaves the model's, where loading fails
            if llm is not None:
                # The caller's variable may keep it alive. From 0.33 on, a late end would end the next engine's groups.
                llm.llm_engine.engine_core.shutdown()
            del llm
            collect()
            cleanup_dist_env_and_memory()


def generate(llm, prompts: Sequence[Sequence[int]], lora_request=None, **sampling) -> list:
    """The outputs for prompts of token ids: greedy, and all NUM_TOKENS of them, unless `sampling` says otherwise."""
    from vllm import SamplingParams

    parameters = SamplingParams(**{"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True} | sampling)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(asked, parameters, use_tqdm=False, lora_request=lora_request)


def tokens(outputs) -> list[list[int]]:
    """The tokens of the first answer to each prompt."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def chosen(outputs) -> list[tuple[list[int], torch.Tensor]]:
    """The tokens of the first answer to each prompt, and their log-probabilities."""
    return [
        (answer, torch.tensor([step[token].logprob for token, step in zip(answer, steps, strict=True)]))
        for answer, steps in zip(tokens(outputs), (output.outputs[0].logprobs for output in outputs), strict=True)
    ]


def report(llm) -> list[dict]:
    """The chosen kernels and their call counts: the rows of the only worker."""
    (rows,) = llm.collective_rpc("opset_report")
    return rows


def served(llm) -> dict[str, set[str]]:
    """The kernels that ran, by op."""
    ran: dict[str, set[str]] = {}
    for row in report(llm):
        if row["calls"]:
            ran.setdefault(row["op"], set()).add(row["kernel"])
    return ran


def runner(llm):
    """The model runner of an engine in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def is_first_runner(llm) -> bool:
    """Whether vLLM's first model runner serves."""
    return not llm.llm_engine.vllm_config.use_v2_model_runner


def counter(llm, name: str) -> int:
    """One of vLLM's metrics, counted since the engine started."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:{name}")
