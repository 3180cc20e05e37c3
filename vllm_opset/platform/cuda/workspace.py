"""Memory for attention's partial results, which stays free when vLLM sizes the KV cache.

paged_attention allocates this memory in each step. vLLM's profile run does not measure it, because that run skips
attention. So a tensor of the same size is allocated during the profile run. A step holds such memory to its end, once
for each group of layers that share a block table. Tokens of images that see each other are attended again, as a batch
of their own, with as much memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu_worker import Worker

from vllm_opset.attention.impl import OpsetAttentionImpl
from vllm_opset.kernels.triton.paged_attention import most_workspace
from vllm_opset.platform.bridges import find, has


@contextmanager
def held_while_profiling(worker: Worker) -> Iterator[None]:
    """Within this context, the worker's profile run counts the memory for attention's partial results."""
    runner = worker.model_runner
    profile_run = runner.profile_run

    def profile_run_with_workspace(*args, **kwargs) -> None:
        workspace = torch.empty(most_bytes(worker), dtype=torch.uint8, device=runner.device)
        profile_run(*args, **kwargs)  # vLLM passes an argument from 0.31 on
        del workspace

    runner.profile_run = profile_run_with_workspace
    try:
        yield
    finally:
        runner.profile_run = profile_run


def most_bytes(worker: Worker) -> int:
    """The most bytes that partial results take in a step of this engine."""
    runner, scheduler = worker.model_runner, worker.scheduler_config
    num_reqs = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    impls = [layer.impl for layer in layers if isinstance(getattr(layer, "impl", None), OpsetAttentionImpl)]
    kinds = {(impl.num_heads, impl.num_kv_heads, impl.head_size, impl.dtype) for impl in impls}
    if not kinds:
        return 0
    groups = kv_cache_groups(worker.vllm_config, runner.get_kv_cache_spec())
    batches = 2 if worker.model_config.is_mm_prefix_lm else 1
    return batches * max(1, len(groups)) * max(most_workspace(*kind, num_reqs, runner.device) for kind in kinds)


def kv_cache_groups(config: VllmConfig, spec: dict) -> list:
    """vLLM's groups of layers that share a block table. The function moved to another module in 0.33."""
    planning = "vllm.v1.core.kv_cache_planning"
    module = planning if has(planning)() else "vllm.v1.core.kv_cache_utils"
    return find(f"{module}.get_kv_cache_groups")(config, spec)
