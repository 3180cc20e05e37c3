"""Calls of kernels before the server is ready, as requests make them: a broken kernel fails the start, no request."""

from typing import TYPE_CHECKING

import torch
from vllm.config import CUDAGraphMode

from vllm_opset import selection

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def one_step_of_second_runner(runner) -> None:
    """Run a step of one token through the model and the sampler, in vLLM's second model runner."""
    _, last = runner._dummy_run(1)
    head(runner, last)
    sampler(runner)
    forget_calls()


def one_step(runner: "GPUModelRunner") -> None:
    """The same in vLLM's first model runner, and compute the step's slot mapping."""
    attends = not runner.is_pooling_model
    _, last = runner._dummy_run(1, cudagraph_runtime_mode=CUDAGraphMode.NONE, force_attention=attends)
    head(runner, last)
    sampler(runner)
    if attends:
        slot_mapping(runner)
    forget_calls()


def forget_calls() -> None:
    """Reset the counters of calls, because reports count only the calls of requests."""
    for choice in selection.choices():
        choice.calls.clear()


def head(runner, last: torch.Tensor) -> None:
    """Multiply the last token's hidden state by the model's head, which vLLM's dummy run leaves out."""
    if not runner.is_pooling_model:
        runner.model.compute_logits(last)


def sampler(runner) -> None:
    """Call the sampler's kernels."""
    if not runner.is_pooling_model:
        runner.sampler.warm_up(runner.device)


def slot_mapping(runner: "GPUModelRunner") -> None:
    """Compute the slot mapping of one token."""
    starts = torch.tensor([0, 1], dtype=torch.int32, device=runner.device)
    runner.input_batch.block_table.compute_slot_mapping(1, starts, torch.zeros_like(starts[:1], dtype=torch.int64))
