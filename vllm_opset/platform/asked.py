"""Rules that are checked before vLLM resolves the configuration: later, users' words have been overridden.

They are for every platform that runs without vLLM's compiled kernels. Each platform adds its own.
"""

import importlib.util
import os
from typing import TYPE_CHECKING

from vllm_opset.platform.refusals import Rule, Settings, compiles, environment, of_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def asks_for(variable: str) -> bool:
    """Whether a user has set one of vLLM's variables to something that is not off. This release may not know it."""
    from vllm import envs

    return variable in os.environ.keys() & envs.environment_variables.keys() and bool(environment(variable))


def unset(feature: str, *variables: str) -> tuple[Rule, ...]:
    """Rules that refuse variables by which users ask for a feature."""
    return tuple(
        Rule(feature, f"unset {variable}", lambda config, variable=variable: asks_for(variable))
        for variable in variables
    )


def is_another_level(config: "VllmConfig") -> bool:
    """-O1 or -O3: a compiler that does less or more than vLLM's default."""
    from vllm.config.vllm import OptimizationLevel

    return config.optimization_level not in (OptimizationLevel.O0, OptimizationLevel.O2)


def gives_a_layout_unasked(config: "VllmConfig") -> bool:
    """By a variable, where vLLM does not ask an attention for the layouts that it supports: in 0.26 to 0.28."""
    return asks_for("VLLM_KV_CACHE_LAYOUT") and importlib.util.find_spec("vllm.v1.kv_cache_layout") is None


def asks_to_compile(config: "VllmConfig") -> bool:
    """Whether users name a mode of torch.compile, before it is what vLLM and its platform say by default."""
    return config.compilation_config.mode is not None and compiles(config)


PROFILERS = Rule(
    "this profiler",
    'give --profiler-config with {"profiler": "torch"}',
    lambda config: config.profiler_config.profiler not in (None, "torch"),
)
NVTX = Rule(
    "NVTX tracing",
    "leave out --enable-layerwise-nvtx-tracing",
    lambda config: config.observability_config.enable_layerwise_nvtx_tracing,
)
FLASHINFER_SAMPLER = unset("FlashInfer's sampler", "VLLM_USE_FLASHINFER_SAMPLER")
TENSOR_DESCRIPTORS = unset("tensor descriptors in vLLM's own Triton kernels", "VLLM_TRITON_USE_TD")
CACHE_LAYOUT = Rule("another layout of the KV cache in this vLLM", "unset VLLM_KV_CACHE_LAYOUT", gives_a_layout_unasked)

# Names in the compilation's configuration that are heeded without a compiler, or that other rules refuse.
WITHOUT_COMPILER = frozenset({"mode", "cudagraph_mode", "custom_ops", "pass_config", "ir_enable_torch_wrap"})
# Those that graph capture heeds.
GRAPHS = frozenset(
    {
        "cudagraph_capture_sizes",
        "max_cudagraph_capture_size",
        "cudagraph_num_of_warmups",
        "cudagraph_copy_inputs",
        "cudagraph_specialize_lora",
    }
)

ASKED: tuple[Rule | Settings, ...] = (
    Settings(
        "settings of vLLM's own attention kernels",
        "attention_config",
        but=frozenset({"backend", "backend_per_kind", "use_non_causal"}),
    ),
    Settings("settings of vLLM's own kernels", "kernel_config"),
    Settings("the compiler's passes that fuse into vLLM's compiled kernels", "compilation_config.pass_config"),
    Rule(
        "this level of optimisation without a mode of torch.compile",
        "leave out --optimization-level, or give 0",
        lambda config: config.compilation_config.mode is None and is_another_level(config),
    ),
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
    CACHE_LAYOUT,
)
