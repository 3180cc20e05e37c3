"""What opset does not do on NVIDIA GPUs with a vLLM that has no compiled kernels."""

from vllm_opset.platform.refusals import RULES as COMMON
from vllm_opset.platform.refusals import Rule, caches_neither_alike_nor_in_fp8, fusions

RULES: tuple[Rule, ...] = (
    *COMMON,
    Rule(
        "speculative decoding with a model that drafts",
        'give --speculative-config with {"method": "ngram"}, or leave it out',
        lambda config: config.speculative_config is not None and config.speculative_config.method != "ngram",
    ),
    Rule("a KV cache in this dtype", "leave out --kv-cache-dtype, or give fp8_e4m3", caches_neither_alike_nor_in_fp8),
    Rule(
        "weight offloading by a view of the host's memory (UVA)",
        "leave out --cpu-offload-gb",
        lambda config: config.offload_config.uva.cpu_offload_gb > 0,
    ),
    Rule(
        "the compiler's passes that fuse into vLLM's compiled kernels",
        "leave pass_config out of --compilation-config",
        lambda config: any(getattr(config.compilation_config.pass_config, name) for name in fusions(config)),
    ),
)
