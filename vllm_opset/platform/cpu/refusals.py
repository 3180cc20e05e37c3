"""The features that opset does not support on a CPU."""

from vllm_opset.model.weights import offloads
from vllm_opset.platform import second_runner
from vllm_opset.platform.cpu import threads
from vllm_opset.platform.early_rules import EARLY_RULES as COMMON_EARLY_RULES
from vllm_opset.platform.early_rules import NVTX, PROFILERS, SIMULATED_ROUTING, WITHOUT_COMPILER, unset
from vllm_opset.platform.quantised_weights import FP8_OF_GPT_OSS, QUANTISED_WEIGHTS
from vllm_opset.platform.refusals import RULES as COMMON
from vllm_opset.platform.refusals import (
    VALUES_APART,
    Rule,
    Settings,
    caches_in_another_dtype,
    captures,
    compiles,
    environment,
    given,
)

# These are checked before vLLM resolves the configuration, because resolving it overrides what users set.
EARLY_RULES: tuple[Rule | Settings, ...] = (
    *COMMON_EARLY_RULES,
    Rule("CUDA graphs", "leave cudagraph_mode out of --compilation-config", captures),
    Settings("torch.compile and CUDA graphs", "compilation_config", except_for=WITHOUT_COMPILER),
    Rule(
        "binding threads to cores",
        "unset VLLM_CPU_OMP_THREADS_BIND, and start under taskset or numactl; OPSET_NUM_THREADS sets their number",
        lambda config: environment("VLLM_CPU_OMP_THREADS_BIND") not in ("auto", "nobind"),
    ),
    Rule(
        "binding all threads to one core by OpenMP",
        f"unset {', '.join(threads.BINDING)}, and start under taskset or numactl",
        lambda config: threads.are_bound(),
    ),
    Rule(
        "reserving cores",
        "unset VLLM_CPU_NUM_OF_RESERVED_CPU, and set OPSET_NUM_THREADS to fewer threads than cores",
        lambda config: environment("VLLM_CPU_NUM_OF_RESERVED_CPU") is not None,
    ),
    *unset(
        "kernels of vLLM's own CPU platform",
        "VLLM_CPU_SGL_KERNEL",
        "VLLM_CPU_ATTN_SPLIT_KV",
        "VLLM_CPU_INT4_W4A8",
        "VLLM_ZENTORCH_WEIGHT_PREPACK",
    ),
    Rule(
        "choosing devices",
        "leave out --device-ids",
        lambda config: config.parallel_config.assigned_physical_gpu_ids is not None,
    ),
    *SIMULATED_ROUTING,
    PROFILERS,
    NVTX,
)

RULES: tuple[Rule, ...] = (
    QUANTISED_WEIGHTS,
    FP8_OF_GPT_OSS,
    *COMMON,
    VALUES_APART,
    second_runner.UNAVAILABLE,
    Rule(
        "batch-sharded sampling",
        "leave out --enable-batch-sharded-sampling",
        lambda config: getattr(config.parallel_config, "enable_batch_sharded_sampling", False),
    ),
    Rule(
        "adapters (LoRA)",
        "merge the adapter into the weights, and leave out --enable-lora",
        given("lora_config"),
    ),
    Rule(
        "weight offloading",
        "leave out --cpu-offload-gb and --offload-*: the weights are in the CPU's memory",
        offloads,
    ),
    Rule("speculative decoding", "leave out --speculative-config", given("speculative_config")),
    Rule(
        "torch.compile",
        "leave the mode out of --compilation-config, or give --enforce-eager",
        compiles,
    ),
    Rule("a KV cache in another dtype than the model's", "leave out --kv-cache-dtype", caches_in_another_dtype),
)
