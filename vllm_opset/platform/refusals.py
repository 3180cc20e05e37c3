"""What this platform does not do. Each feature is refused while the configuration is checked, in one line that names
the feature and the cure; none is ignored.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm import envs

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Refusal(NotImplementedError):
    """A feature that is not supported. The message names the cure."""


@dataclass(frozen=True)
class Rule:
    """feature: what is refused if `applies` to the configuration. cure: what to do instead."""

    feature: str
    cure: str
    applies: Callable[["VllmConfig"], bool]

    def __str__(self) -> str:
        return f"vllm-opset on a CPU does not support {self.feature}: {self.cure}."


def check_asked(config: "VllmConfig") -> None:
    """Raises Refusal for what can only be seen before vLLM resolves the configuration: later it has been overridden."""
    _check(ASKED, config)


def check(config: "VllmConfig") -> None:
    """Raises Refusal for what the resolved configuration holds."""
    _check(RULES, config)


def _check(rules: tuple[Rule, ...], config: "VllmConfig") -> None:
    for rule in rules:
        if rule.applies(config):
            raise Refusal(str(rule))


def check_attention(selected_backend, wanted) -> None:
    """Raises Refusal if opset's attention cannot be what a layer asks for.

    selected_backend: what the user asked for, or None. wanted: vLLM's AttentionSelectorConfig.
    """
    from vllm_opset.attention.backend import OpsetAttentionBackend

    if selected_backend is not None and selected_backend.name != OpsetAttentionBackend.get_name():
        raise Refusal(f"vllm-opset has one attention backend: leave out --attention-backend {selected_backend.name}.")
    reasons = OpsetAttentionBackend.validate_configuration(device_capability=None, **wanted._asdict())
    if reasons:
        raise Refusal(f"vllm-opset on a CPU cannot serve an attention layer of this model: {', '.join(reasons)}.")


def _model(is_so: Callable) -> Callable[["VllmConfig"], bool]:
    return lambda config: config.model_config is not None and bool(is_so(config.model_config))


def _several(name: str) -> Callable[["VllmConfig"], bool]:
    return lambda config: getattr(config.parallel_config, name) > 1


def _given(name: str) -> Callable[["VllmConfig"], bool]:
    # Some parts of the configuration came or go with a release: what cannot be asked for needs no refusal.
    return lambda config: getattr(config, name, None) is not None


def _caches_in_another_dtype(config: "VllmConfig") -> bool:
    same = () if config.model_config is None else (str(config.model_config.dtype).removeprefix("torch."),)
    return config.cache_config.cache_dtype not in ("auto", *same)


def _compiles(config: "VllmConfig") -> bool:
    from vllm.config import CompilationMode

    return config.compilation_config.mode != CompilationMode.NONE


def _captures(config: "VllmConfig") -> bool:
    from vllm.config import CUDAGraphMode

    return config.compilation_config.cudagraph_mode not in (None, CUDAGraphMode.NONE)


ANOTHER_MODEL = "choose another model"
WIDER = "use --tensor-parallel-size instead"

QUANTISED_WEIGHTS = Rule(
    "quantised weights",
    "choose a checkpoint in float32, bfloat16 or float16",
    _model(lambda model: model.quantization is not None),
)

ASKED: tuple[Rule, ...] = (
    Rule("CUDA graphs", "leave cudagraph_mode out of --compilation-config", _captures),
    Rule(
        "binding threads to cores",
        "unset VLLM_CPU_OMP_THREADS_BIND, and start under taskset or numactl; OPSET_NUM_THREADS sets their number",
        lambda config: envs.VLLM_CPU_OMP_THREADS_BIND not in ("auto", "nobind"),
    ),
    Rule(
        "reserving cores",
        "unset VLLM_CPU_NUM_OF_RESERVED_CPU; one core is left free, or set OPSET_NUM_THREADS",
        lambda config: envs.VLLM_CPU_NUM_OF_RESERVED_CPU is not None,
    ),
)

RULES: tuple[Rule, ...] = (
    # The model
    QUANTISED_WEIGHTS,
    Rule("multi-head latent attention (MLA)", ANOTHER_MODEL, _model(lambda model: model.use_mla)),
    Rule("Mamba, state-space and linear attention", ANOTHER_MODEL, _model(lambda model: model.has_inner_state)),
    Rule("mixture-of-experts (MoE) models", ANOTHER_MODEL, _model(lambda model: model.is_moe)),
    Rule("multimodal models", ANOTHER_MODEL, _model(lambda model: model.is_multimodal_model)),
    Rule("encoder-decoder models", ANOTHER_MODEL, _model(lambda model: model.is_encoder_decoder)),
    Rule(
        "adapters (LoRA)",
        "merge the adapter into the weights, and leave out --enable-lora",
        _given("lora_config"),
    ),
    Rule("sleep mode", "leave out --enable-sleep-mode", _model(lambda model: model.enable_sleep_mode)),
    Rule("weight transfer", "leave out --weight-transfer-config", _given("weight_transfer_config")),
    Rule(
        "weight offloading",
        "leave out --cpu-offload-gb and --offload-*: the weights are in the CPU's memory",
        lambda config: (
            config.offload_config.uva.cpu_offload_gb > 0 or config.offload_config.prefetch.offload_group_size > 0
        ),
    ),
    # Generating
    Rule("speculative decoding", "leave out --speculative-config", _given("speculative_config")),
    Rule("diffusion models", ANOTHER_MODEL, _given("diffusion_config")),
    Rule("prompt embeddings", "leave out --enable-prompt-embeds", _model(lambda model: model.enable_prompt_embeds)),
    Rule(
        "fp64 sampling noise",
        "leave out --use-fp64-gumbel",
        _model(lambda model: getattr(model, "use_fp64_gumbel", False)),
    ),
    Rule(
        "batch invariance",
        "unset VLLM_BATCH_INVARIANT; seeded requests draw the same tokens in any batch as it is",
        lambda config: envs.VLLM_BATCH_INVARIANT,
    ),
    Rule(
        "vLLM's second model runner",
        "unset VLLM_USE_V2_MODEL_RUNNER",
        lambda config: config.use_v2_model_runner,
    ),
    Rule(
        "torch.compile",
        "leave the mode out of --compilation-config, or give --enforce-eager",
        _compiles,
    ),
    # The KV cache
    Rule("a KV cache in another dtype than the model's", "leave out --kv-cache-dtype", _caches_in_another_dtype),
    Rule("KV connectors", "leave out --kv-transfer-config", _given("kv_transfer_config")),
    Rule("encoder cache connectors", "leave out --ec-transfer-config", _given("ec_transfer_config")),
    Rule(
        "KV cache offloading",
        "leave out --kv-offloading-size: the cache is in the CPU's memory",
        lambda config: config.cache_config.kv_offloading_size is not None,
    ),
    Rule(
        "fast prefill with a shared KV cache",
        "leave out --kv-sharing-fast-prefill",
        lambda config: config.cache_config.kv_sharing_fast_prefill,
    ),
    # Several processes
    Rule("pipeline parallelism", WIDER, _several("pipeline_parallel_size")),
    Rule("data parallelism", WIDER, _several("data_parallel_size")),
    Rule("prefill context parallelism", WIDER, _several("prefill_context_parallel_size")),
    Rule("decode context parallelism", WIDER, _several("decode_context_parallel_size")),
    Rule("several machines", "leave out --nnodes", _several("nnodes")),
    Rule(
        "two batches at a time (DBO)",
        "leave out --enable-dbo and --ubatch-size",
        lambda config: config.parallel_config.enable_dbo or config.parallel_config.ubatch_size > 1,
    ),
    Rule(
        "Ray",
        "leave out --distributed-executor-backend, or give mp or uni",
        lambda config: config.parallel_config.distributed_executor_backend == "ray",
    ),
)
