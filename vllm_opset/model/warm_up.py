"""Calls of kernels before the server is ready, as requests make them: a broken kernel fails the start, no request."""

import functools
from collections.abc import Callable

import torch

from vllm_opset import selection

FEW_TOKENS = 4


def one_step(runner) -> None:
    """Run a step of one token through the model and the sampler, in vLLM's second model runner."""
    _, last = runner._dummy_run(1)
    head(runner, last)
    sampler(runner)
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
    """Call the kernels of opset's sampler. A model may bring a sampler of its own."""
    if not runner.is_pooling_model and hasattr(runner.sampler, "warm_up"):
        runner.sampler.warm_up(runner.device)


def step_of_few_tokens(runner) -> Callable[[], object]:
    """A step of FEW_TOKENS through a model that was just loaded. It has no KV cache, so attention computes nothing."""
    arguments = {"skip_attn": True} if runner.vllm_config.use_v2_model_runner else {}
    return functools.partial(runner._dummy_run, FEW_TOKENS, is_profile=True, **arguments)
