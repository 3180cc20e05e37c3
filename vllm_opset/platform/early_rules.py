"""Rules that are checked before vLLM resolves the configuration, because resolving it overrides what users set.

They apply to every platform that runs without vLLM's compiled kernels. Each platform adds its own.
"""

import importlib.util
import os
from typing import TYPE_CHECKING

from vllm_opset.platform import settings
from vllm_opset.platform.refusals import Rule, Settings, compiles, environment, of_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def asks_for(variable: str) -> bool:
    """Whether a user has enabled one of vLLM's environment variables. A release that lacks the variable answers no."""
    from vllm import envs

    return variable in os.environ.keys() & envs.environment_variables.keys() and bool(environment(variable))


def unset(feature: str, *variables: str) -> tuple[Rule, ...]:
    """Rules that refuse a feature if users ask for it by one of these environment variables."""
    return tuple(
        Rule(feature, f"unset {variable}", lambda config, variable=variable: asks_for(variable))
        for variable in variables
    )


def is_another_level(config: "VllmConfig") -> bool:
    """Whether the level is -O1 or -O3, at which the compiler does less or more than by vLLM's default."""
    from vllm.config.vllm import OptimizationLevel

    return config.optimization_level not in (OptimizationLevel.O0, OptimizationLevel.O2)


def gives_a_layout_unasked(config: "VllmConfig") -> bool:
    """Whether a variable sets the cache layout in a vLLM that does not ask the attention backend (0.26 to 0.28)."""
    return asks_for("VLLM_KV_CACHE_LAYOUT") and importlib.util.find_spec("vllm.v1.kv_cache_layout") is None


def asks_to_compile(config: "VllmConfig") -> bool:
    """Whether users set a torch.compile mode. It must run before vLLM and the platform fill in the default mode."""
    return config.compilation_config.mode is not None and compiles(config)


def chooses_passes_without_mode(config: "VllmConfig") -> bool:
    """Whether users ask for passes of torch.compile and leave its mode to the platform."""
    return config.compilation_config.mode is None and bool(settings.changed(config, "compilation_config.pass_config"))


PROFILERS = Rule(
    "profilers other than PyTorch's",
    'give --profiler-config with {"profiler": "torch"}',
    lambda config: config.profiler_config.profiler not in (None, "torch"),
)
NVTX = Rule(
    "NVTX tracing",
    "leave out --enable-layerwise-nvtx-tracing",
    lambda config: config.observability_config.enable_layerwise_nvtx_tracing,
)
FLASHINFER_SAMPLER = unset("FlashInfer's sampler", "VLLM_USE_FLASHINFER_SAMPLER")
SIMULATED_ROUTING = unset("simulated routing of experts", "VLLM_MOE_ROUTING_SIMULATION_STRATEGY")
TENSOR_DESCRIPTORS = unset("tensor descriptors in vLLM's own Triton kernels", "VLLM_TRITON_USE_TD")
# vLLM asks any kernel for such activations if the weights are in GPTQ's format.
MARLIN_INPUTS = unset("activations that vLLM's Marlin kernels quantise", "VLLM_MARLIN_INPUT_DTYPE")
LEVELS = Rule(
    "optimisation levels 1 and 3 without a mode of torch.compile",
    "leave out --optimization-level, or give 0",
    lambda config: config.compilation_config.mode is None and is_another_level(config),
)
PASSES = Rule(
    "passes of torch.compile without its mode", "give a mode in --compilation-config, too", chooses_passes_without_mode
)
CACHE_LAYOUT = Rule(
    "another layout of the KV cache before vLLM 0.29", "unset VLLM_KV_CACHE_LAYOUT", gives_a_layout_unasked
)

# Fields of the compilation config that take effect without a compiler, or that other rules refuse.
WITHOUT_COMPILER = frozenset({"mode", "cudagraph_mode", "custom_ops", "pass_config", "ir_enable_torch_wrap"})
# Fields that graph capture uses.
GRAPHS = frozenset(
    {
        "cudagraph_capture_sizes",
        "max_cudagraph_capture_size",
        "cudagraph_num_of_warmups",
        "cudagraph_copy_inputs",
        "cudagraph_specialize_lora",
    }
)

EARLY_RULES: tuple[Rule | Settings, ...] = (
    Settings(
        "settings of vLLM's own attention kernels",
        "attention_config",
        except_for=frozenset({"backend", "backend_per_kind", "use_non_causal"}),
    ),
    Settings("settings of vLLM's own kernels", "kernel_config"),
    Settings("the compiler's passes that fuse into vLLM's compiled kernels", "compilation_config.pass_config"),
    LEVELS,
    Rule(
        "cascade attention",
        "leave out --no-disable-cascade-attn",
        of_model(lambda model: not model.disable_cascade_attn),
    ),
    Rule(
        "binding processes to NUMA nodes",
        "leave out --numa-bind, and start under numactl",
        lambda config: config.parallel_config.numa_bind,
    ),
    *FLASHINFER_SAMPLER,
    *TENSOR_DESCRIPTORS,
    *MARLIN_INPUTS,
    CACHE_LAYOUT,
)
