"""What opset does not do on a CPU."""

from vllm_opset.platform.refusals import RULES as COMMON
from vllm_opset.platform.refusals import Rule, caches_in_another_dtype, captures, compiles, environment, given, offloads

# What can only be seen before vLLM resolves the configuration: later it has been overridden.
ASKED: tuple[Rule, ...] = (
    Rule("CUDA graphs", "leave cudagraph_mode out of --compilation-config", captures),
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
