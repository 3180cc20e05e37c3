"""Memory for attention's partial results, kept free when vLLM sizes the KV cache.

paged_attention allocates it in each step, after vLLM has measured what a step takes: the profile run does not attend.
So as much is held while that runs. A step holds it to its end, once for each group of layers that share a block table.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm.v1.worker.gpu_worker import Worker

from vllm_opset.attention.impl import OpsetAttentionImpl
from vllm_opset.kernels.triton.paged_attention import most_workspace
from vllm_opset.platform import compat


@contextmanager
def held_while_profiling(worker: Worker) -> Iterator[None]:
    """Within it, the worker's profile run counts attention's partial results."""
    runner = worker.model_runner
    profile_run = runner.profile_run

    def profile_run_with_workspace(*args, **kwargs) -> None:
        workspace = torch.empty(most_bytes(worker), dtype=torch.uint8, device=runner.device)
        profile_run(*args, **kwargs)  # 0.33 gives an argument
        del workspace

    runner.profile_run = profile_run_with_workspace
    try:
        yield
    finally:
        runner.profile_run = profile_run


def most_bytes(worker: Worker) -> int:
    """What partial results take in a step of this engine, at most."""
    runner, scheduler = worker.model_runner, worker.scheduler_config
    num_reqs = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    impls = [layer.impl for layer in layers if isinstance(getattr(layer, "impl", None), OpsetAttentionImpl)]
    kinds = {(impl.num_heads, impl.num_kv_heads, impl.head_size, impl.dtype) for impl in impls}
    if not kinds:
        return 0
    groups = compat.kv_cache_groups(worker.vllm_config, runner.get_kv_cache_spec())
    return max(1, len(groups)) * max(most_workspace(*kind, num_reqs, runner.device) for kind in kinds)
