"""What opset does not do on a CPU."""

from typing import TYPE_CHECKING

from vllm_opset.platform.refusals import RULES as COMMON
from vllm_opset.platform.refusals import Rule, environment, given

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def _captures(config: "VllmConfig") -> bool:
    from vllm.config import CUDAGraphMode

    return config.compilation_config.cudagraph_mode not in (None, CUDAGraphMode.NONE)


def _compiles(config: "VllmConfig") -> bool:
    from vllm.config import CompilationMode

    return config.compilation_config.mode != CompilationMode.NONE


def _caches_in_another_dtype(config: "VllmConfig") -> bool:
    same = () if config.model_config is None else (str(config.model_config.dtype).removeprefix("torch."),)
    return config.cache_config.cache_dtype not in ("auto", *same)


# What can only be seen before vLLM resolves the configuration: later it has been overridden.
ASKED: tuple[Rule, ...] = (
    Rule("CUDA graphs", "leave cudagraph_mode out of --compilation-config", _captures),
    Rule(
        "binding threads to cores",
        "unset VLLM_CPU_OMP_THREADS_BIND, and start under taskset or numactl; OPSET_NUM_THREADS sets their number",
        lambda config: environment("VLLM_CPU_OMP_THREADS_BIND") not in ("auto", "nobind"),
    ),
    Rule(
        "reserving cores",
        "unset VLLM_CPU_NUM_OF_RESERVED_CPU; one core is left free, or set OPSET_NUM_THREADS",
        lambda config: environment("VLLM_CPU_NUM_OF_RESERVED_CPU") is not None,
    ),
)

RULES: tuple[Rule, ...] = (
    *COMMON,
    Rule(
        "adapters (LoRA)",
        "merge the adapter into the weights, and leave out --enable-lora",
        given("lora_config"),
    ),
    Rule(
        "weight offloading",
        "leave out --cpu-offload-gb and --offload-*: the weights are in the CPU's memory",
        lambda config: (
            config.offload_config.uva.cpu_offload_gb > 0 or config.offload_config.prefetch.offload_group_size > 0
        ),
    ),
    Rule("speculative decoding", "leave out --speculative-config", given("speculative_config")),
    Rule(
        "torch.compile",
        "leave the mode out of --compilation-config, or give --enforce-eager",
        _compiles,
    ),
    Rule("a KV cache in another dtype than the model's", "leave out --kv-cache-dtype", _caches_in_another_dtype),
)
