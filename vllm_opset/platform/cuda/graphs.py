"""The choice of CUDA graphs: full graphs for decode steps, and piecewise ones, broken at attention, for other steps.

`full_graphs` replaces the piecewise graphs by full ones, where attention allows it.

If no compiler cuts a model into pieces, vLLM's breakable graphs do. A variable of vLLM enables them, and this module
sets it. The variable also switches torch.compile off, so it is removed before the next engine is configured.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from vllm_opset import targets
from vllm_opset.model import weights
from vllm_opset.platform import multimodal, refusals

if TYPE_CHECKING:
    from vllm.config import CUDAGraphMode, VllmConfig

VARIABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"
OURS = "OPSET_SET_BREAKABLE_CUDAGRAPH"  # set with it, so that no process takes the variable for a user's choice

# Sizes beyond vLLM's own are multiples of this many tokens. Matrix products use tiles of as many rows.
ROWS = 128
# Beyond 1,024 tokens, sizes are multiples of the largest power of two in them, divided by this: padding adds an eighth
# at most.
TOKENS_TO_PADDING = 8

# Whether a user has set capture sizes in the configuration that vLLM is completing.
_sizes_are_named: bool

_may_keep_images = refusals.of_model(multimodal.may_keep_images)


def default(config: "VllmConfig") -> "CUDAGraphMode":
    """The graphs to capture without a compiler, unless a user says otherwise."""
    from vllm.config import CUDAGraphMode

    if _pools(config) or refusals.wants_quick_start(config) or _may_keep_images(config):
        return CUDAGraphMode.NONE
    return CUDAGraphMode.FULL_AND_PIECEWISE if _can_break(config) else CUDAGraphMode.FULL_DECODE_ONLY


def ask_for_piecewise(config: "VllmConfig") -> None:
    """Set vLLM's variable if this configuration has piecewise graphs without a compiler, and no user has set it."""
    from vllm import envs

    compilation = config.compilation_config
    graphs = default(config) if compilation.cudagraph_mode is None else compilation.cudagraph_mode
    wanted = graphs.has_piecewise_cudagraphs() and (compilation.mode is None or not refusals.compiles(config))
    if wanted and _can_break(config) and VARIABLE not in os.environ:
        os.environ |= {VARIABLE: "1", OURS: "1"}
        envs.disable_envs_cache()  # another engine in this process may have filled it


def take_back() -> None:
    """Remove the variable before another engine is configured, because that engine may have a compiler."""
    from vllm import envs

    if os.environ.pop(OURS, None) and os.environ.get(VARIABLE) == "1":
        del os.environ[VARIABLE]
        envs.disable_envs_cache()


def are_piecewise(config: "VllmConfig") -> bool:
    """Whether this configuration, which vLLM has completed, has piecewise graphs without a compiler."""
    return not refusals.compiles(config) and config.compilation_config.cudagraph_mode.has_piecewise_cudagraphs()


def check(config: "VllmConfig") -> None:
    """Raise Refusal if the variable has changed for another engine since this engine was configured."""
    enabled = refusals.environment(VARIABLE)
    if (enabled and refusals.compiles(config)) or (are_piecewise(config) and not enabled):
        raise refusals.Refusal(
            f"vllm-opset: {VARIABLE} is no longer what it was when this engine was configured: start each engine "
            "before the next one is configured, or set the variable."
        )


def note_named_sizes(config: "VllmConfig") -> None:
    """Record whether a user set sizes. Call it before vLLM adds sizes of its own, and `capture_longer_steps` after."""
    global _sizes_are_named
    compilation = config.compilation_config
    # A size in compile_sizes, which is compiled separately, must be captured or longer than all captured sizes.
    named = compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size, compilation.compile_sizes
    _sizes_are_named = any(named)


def capture_longer_steps(config: "VllmConfig", in_fp8: bool = False) -> None:
    """Add sizes to those that vLLM has chosen, if there are piecewise graphs.

    in_fp8: whether opset's kernels multiply the model's weights in fp8.
    """
    compilation = config.compilation_config
    sizes = compilation.cudagraph_capture_sizes
    # Sequence parallelism in vLLM up to 0.31 needs sizes that are multiples of its own number.
    own_sizes = _sizes_are_named or getattr(compilation.pass_config, "enable_sp", False)
    if own_sizes or not sizes or not compilation.cudagraph_mode.has_piecewise_cudagraphs():
        return
    longest = min(captured_tokens(config.model_config.get_hidden_size(), in_fp8), _longest_step(config))
    if longest > sizes[-1]:
        compilation.cudagraph_capture_sizes = [*sizes, *_sizes_between(sizes[-1], longest), longest]
        compilation.max_cudagraph_capture_size = longest


def captured_tokens(hidden_size: int, in_fp8: bool = False) -> int:
    """The most tokens of a step that is captured, for the first GPU. limits.yaml has the rule."""
    from vllm_opset.platform.cuda import nvml

    table = yaml.safe_load(Path(__file__).with_name("limits.yaml").read_text())["captured_tokens"]
    gpu = nvml.gpu(0)
    limit = targets.nearest(gpu.target, table) if gpu else next(iter(table.values()))
    launched = limit["of_hidden_size_4096"] * 4096**2 // hidden_size**2
    if in_fp8:
        launched *= limit["fp8_factor"]
    return min(limit["most"], max(limit["least"], launched // ROWS * ROWS))


def _sizes_between(size: int, longest: int) -> Iterator[int]:
    """Sizes above `size` and below `longest`."""
    while (size := _next_size(size)) < longest:
        yield size


def _next_size(size: int) -> int:
    power_of_two = 1 << size.bit_length() - 1
    distance = max(ROWS, power_of_two // TOKENS_TO_PADDING)
    return (size // distance + 1) * distance


def _longest_step(config: "VllmConfig") -> int:
    """The most tokens of a step. A graph is captured over the most requests that a step may have."""
    scheduler = config.scheduler_config
    return min(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * config.model_config.max_model_len)


def _can_break(config: "VllmConfig") -> bool:
    """False for pooling models, which may have new input tensors in every step, and for offloaded layers.

    The copies of an offloaded layer would span two pieces.
    """
    may = os.environ.get(VARIABLE, "1") == "1"
    return may and config.model_config is not None and not _pools(config) and not weights.offloads(config)


def _pools(config: "VllmConfig") -> bool:
    return config.model_config is not None and config.model_config.runner_type == "pooling"
