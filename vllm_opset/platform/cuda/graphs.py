"""Which graphs are captured: of decode whole ones, of other steps in pieces, between which attention is launched.

Where no compiler cuts a model into pieces, they are what vLLM calls breakable graphs. A variable of vLLM's asks for
them, which is set here and taken back before the next engine is configured: it also switches torch.compile off.
"""

import os
from typing import TYPE_CHECKING

from vllm_opset.model import weights
from vllm_opset.platform import refusals

if TYPE_CHECKING:
    from vllm.config import CUDAGraphMode, VllmConfig

VARIABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"
OURS = "OPSET_SET_BREAKABLE_CUDAGRAPH"  # set beside it, so that no process takes it for a user's word

# Tokens up to which steps are captured, unless a user says otherwise; vLLM stops at 512. To launch a step of Qwen3-8B
# takes Python 22 ms on a quick core, in which an H200 computes 1,000 tokens of it, and more of smaller models.
LONGEST = 2048
# Between the sizes beyond vLLM's own. Matrix products come in tiles of as many rows: padding to them costs little.
ROWS = 128

# Whether a user has, in the configuration that is being completed.
_sizes_are_named: bool


def default(config: "VllmConfig") -> "CUDAGraphMode":
    """What is captured without a compiler, unless a user says otherwise."""
    from vllm.config import CUDAGraphMode

    if _pools(config) or refusals.wants_quick_start(config):
        return CUDAGraphMode.NONE
    return CUDAGraphMode.FULL_AND_PIECEWISE if _can_break(config) else CUDAGraphMode.FULL_DECODE_ONLY


def ask_for_pieces(config: "VllmConfig") -> None:
    """Sets vLLM's variable, unless a user has, if this configuration captures pieces and has no compiler."""
    from vllm import envs

    compilation = config.compilation_config
    graphs = default(config) if compilation.cudagraph_mode is None else compilation.cudagraph_mode
    wanted = graphs.has_piecewise_cudagraphs() and (compilation.mode is None or not refusals.compiles(config))
    if wanted and _can_break(config) and VARIABLE not in os.environ:
        os.environ |= {VARIABLE: "1", OURS: "1"}
        envs.disable_envs_cache()  # of an engine that is up in this process


def take_back() -> None:
    """Before another engine is configured: it may have a compiler."""
    from vllm import envs

    if os.environ.pop(OURS, None) and os.environ.get(VARIABLE) == "1":
        del os.environ[VARIABLE]
        envs.disable_envs_cache()


def in_pieces(config: "VllmConfig") -> bool:
    """Whether this configuration, which vLLM has completed, captures pieces without a compiler."""
    return not refusals.compiles(config) and config.compilation_config.cudagraph_mode.has_piecewise_cudagraphs()


def note_named_sizes(config: "VllmConfig") -> None:
    """To be called before vLLM completes the configuration with sizes of its own, and the next function after."""
    global _sizes_are_named
    compilation = config.compilation_config
    # A size that is compiled by itself must be captured or longer than all that are.
    named = compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size, compilation.compile_sizes
    _sizes_are_named = any(named)


def capture_longer_steps(config: "VllmConfig") -> None:
    """Adds sizes to those that vLLM has chosen, if pieces are captured."""
    compilation = config.compilation_config
    sizes = compilation.cudagraph_capture_sizes
    # Sequence parallelism, of vLLM up to 0.30, wants multiples of its own.
    own_sizes = _sizes_are_named or getattr(compilation.pass_config, "enable_sp", False)
    if own_sizes or not sizes or not compilation.cudagraph_mode.has_piecewise_cudagraphs():
        return
    longest = min(LONGEST, _longest_step(config))
    if longest > sizes[-1]:
        beyond = range((sizes[-1] // ROWS + 1) * ROWS, longest, ROWS)
        compilation.cudagraph_capture_sizes = [*sizes, *beyond, longest]
        compilation.max_cudagraph_capture_size = longest


def _longest_step(config: "VllmConfig") -> int:
    """Tokens of all requests together. A graph is captured over as many requests as there may be."""
    scheduler = config.scheduler_config
    return min(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * config.model_config.max_model_len)


def check(config: "VllmConfig") -> None:
    """Raises Refusal in an engine that starts after the variable has changed for another."""
    enabled = refusals.environment(VARIABLE)
    if (enabled and refusals.compiles(config)) or (in_pieces(config) and not enabled):
        raise refusals.Refusal(
            f"vllm-opset: {VARIABLE} is no longer what it was when this engine was configured: start each engine "
            "before the next one is configured, or set the variable."
        )


def _can_break(config: "VllmConfig") -> bool:
    """A pooling model's inputs may be new tensors in every step; an offloaded layer's copies would span two pieces."""
    may = os.environ.get(VARIABLE, "1") == "1"
    return may and config.model_config is not None and not _pools(config) and not weights.offloads(config)


def _pools(config: "VllmConfig") -> bool:
    return config.model_config is not None and config.model_config.runner_type == "pooling"
