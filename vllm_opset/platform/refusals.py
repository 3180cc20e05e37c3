"""The features that a platform does not support. Each is refused in one line while the configuration is checked.

The line names the feature and the cure. No unsupported feature is silently ignored. This module has the rules for all
of opset's platforms that run without vLLM's compiled kernels; each platform adds its own. `tests/platform/settings`
lists for every setting of vLLM whether it is supported, refused or meaningless here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from vllm_opset import selection
from vllm_opset.kernel import REFERENCE
from vllm_opset.platform import settings
from vllm_opset.unsupported import ANOTHER_MODEL, Refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

# Ops that vLLM calls before it replays the model's graph, or after it. Their references may read from the device.
OUTSIDE_GRAPHS = {"compute_slot_mapping", "apply_penalties", "top_k_top_p_sample"}
CAPTURABLE_REFERENCES = {"linear"}  # PyTorch's own operator


@dataclass(frozen=True)
class Rule:
    """A refused feature. feature: is refused if `applies` to the configuration. cure: what the user can do instead."""

    feature: str
    cure: str
    applies: Callable[["VllmConfig"], bool]

    def refusal(self, where: str, config: "VllmConfig | None" = None) -> Refusal:
        """The exception to raise. where: a phrase like "on a CPU"."""
        return Refusal(f"vllm-opset {where} does not support {self.feature}: {self.cure}.")


@dataclass(frozen=True)
class Settings:
    """Refuse settings of one part of the configuration that a user changed, because no code here uses them.

    feature: the purpose of these settings. part: see `settings.changed`. except_for: names that some code here uses, or
    that another rule checks. unless: whether all of the settings are used under a configuration.
    """

    feature: str
    part: str
    except_for: frozenset[str] = frozenset()
    unless: Callable[["VllmConfig"], bool] = lambda config: False

    def applies(self, config: "VllmConfig") -> list[str]:
        """The flags of the settings to refuse."""
        names = [] if self.unless(config) else settings.changed(config, self.part)
        return [settings.flag(self.part, name) for name in names if name not in self.except_for]

    def refusal(self, where: str, config: "VllmConfig") -> Refusal:
        flags = " and ".join(self.applies(config))
        return Refusal(f"vllm-opset {where} does not support {self.feature}: leave out {flags}.")


def check(rules: Iterable[Rule | Settings], config: "VllmConfig", where: str) -> None:
    """Raise Refusal for the first rule that applies."""
    for rule in rules:
        if rule.applies(config):
            raise rule.refusal(where, config)


def check_attention(backend: str, selected_backend, wanted, where: str) -> None:
    """Raise Refusal if the platform's attention backend cannot serve a layer.

    backend: the qualified name of the platform's backend class. selected_backend: the user's choice, or None. wanted:
    vLLM's AttentionSelectorConfig.
    """
    from vllm.utils.import_utils import resolve_obj_by_qualname

    ours = resolve_obj_by_qualname(backend)
    if selected_backend is not None and selected_backend.name != ours.get_name():
        raise Refusal(f"vllm-opset has one attention backend: leave out --attention-backend {selected_backend.name}.")
    reasons = ours.validate_configuration(device_capability=None, **wanted._asdict())
    if reasons:
        raise Refusal(f"vllm-opset {where} cannot serve an attention layer of this model: {', '.join(reasons)}.")


def check_graphs(choices: Iterable[selection.Choice]) -> None:
    """Raise Refusal for a reference that a graph would have to capture: it may read lengths back from the device."""
    for choice in choices:
        if choice.kernel.provider == REFERENCE and choice.op not in OUTSIDE_GRAPHS | CAPTURABLE_REFERENCES:
            raise Refusal(
                f"vllm-opset's reference of {choice.op} cannot be captured in a graph: give --enforce-eager, or "
                "choose another kernel."
            )


def of_model(is_so: Callable) -> Callable[["VllmConfig"], bool]:
    """A condition of a rule: whether a ModelConfig `is_so`. It is False for a configuration without a model."""
    return lambda config: config.model_config is not None and bool(is_so(config.model_config))


def looks_back(model) -> bool:
    """Whether layers attend in chunks and to the chunk before. Other models name such layers and do not look back."""
    layers = getattr(model.hf_text_config, "layer_types", None) or ()
    return "Rnj1ForCausalLM" in model.architectures and "chunked_attention" in layers


def sizes_values_apart(model) -> bool:
    """Whether values have another size than keys. Such models name an attention backend of vLLM, which needs Triton.

    The configurations of other models have such sizes as well. These models pad the values.
    """
    config, names = model.hf_text_config, " ".join(model.architectures)
    if "MiMoV2" in names:  # which sizes layers with a window by themselves
        sizes = (
            (getattr(config, name, None) for name in (f"{kind}v_head_dim", f"{kind}head_dim")) for kind in ("", "swa_")
        )
        return any(value not in (None, key) for value, key in sizes)
    return "Pangu" in names and getattr(config, "param_sink_number", 0) > 0


def windows_generated_tokens(model) -> bool:
    """Whether generated tokens see the whole prompt and a window of each other. vLLM calls it R-SWA."""
    return model.rswa_window is not None


def has_square_root_alibi(model) -> bool:
    return "Step1ForCausalLM" in model.architectures  # no setting of a model says so


def several(name: str) -> Callable[["VllmConfig"], bool]:
    """A condition of a rule: whether this number of the parallel configuration is above 1."""
    return lambda config: getattr(config.parallel_config, name) > 1


def returns_experts(config: "VllmConfig") -> bool:
    """Whether vLLM is to return the experts that each token was sent to."""
    # 0.33 has the setting in a part of its own, which earlier releases lack.
    parts = (config.model_config, getattr(config, "aux_output_config", None))
    return any(getattr(part, "enable_return_routed_experts", False) for part in parts)


def two_batches(config: "VllmConfig") -> bool:
    return config.parallel_config.enable_dbo or config.parallel_config.ubatch_size > 1


def given(name: str) -> Callable[["VllmConfig"], bool]:
    """A condition of a rule: whether a user gave this part of the configuration.

    Releases add and drop parts. A part that is missing needs no refusal.
    """
    return lambda config: getattr(config, name, None) is not None


def captures(config: "VllmConfig") -> bool:
    """Whether graphs are captured. It is False as long as neither a user nor the platform has set a mode."""
    from vllm.config import CUDAGraphMode

    return config.compilation_config.cudagraph_mode not in (None, CUDAGraphMode.NONE)


def wants_quick_start(config: "VllmConfig") -> bool:
    """Whether a user gave -O0, which asks for no compiler and no graphs."""
    from vllm.config.vllm import OptimizationLevel

    return config.optimization_level == OptimizationLevel.O0


def compiles(config: "VllmConfig") -> bool:
    """Whether torch.compile is on. It is True as long as neither a user nor the platform has set a mode."""
    from vllm.config import CompilationMode

    return config.compilation_config.mode != CompilationMode.NONE


def fusions(config: "VllmConfig") -> list[str]:
    """The compiler passes that can be switched and that fuse. All fuse into kernels that only a compiled vLLM has."""
    names = (field.name for field in fields(config.compilation_config.pass_config))
    return [name for name in names if name.startswith(("fuse_", "enable_"))]


def caches_in_another_dtype(config: "VllmConfig") -> bool:
    """Whether the KV cache has another dtype than the model."""
    same = () if config.model_config is None else (str(config.model_config.dtype).removeprefix("torch."),)
    return config.cache_config.cache_dtype not in ("auto", *same)


def caches_neither_alike_nor_in_fp8(config: "VllmConfig") -> bool:
    return config.cache_config.cache_dtype not in ("fp8", "fp8_e4m3") and caches_in_another_dtype(config)


def environment(name: str):
    """One of vLLM's variables, as vLLM reads it. Imported late: vLLM asks for its platform while it is imported."""
    from vllm import envs

    return getattr(envs, name)


WIDER = "use --tensor-parallel-size instead"
WITHOUT_RAY = "leave out --distributed-executor-backend, or give mp or uni"

SLEEP = Rule("sleep mode", "leave out --enable-sleep-mode", of_model(lambda model: model.enable_sleep_mode))
CUMEM_ALLOCATOR = Rule(
    "vLLM's CuMem allocator",
    "leave out --enable-cumem-allocator",
    of_model(lambda model: model.enable_cumem_allocator),
)
EXPERT_PARALLELISM = Rule(
    "expert parallelism",
    "leave out --enable-expert-parallel",
    lambda config: config.parallel_config.enable_expert_parallel,
)
EPLB = Rule(
    "balancing experts between workers (EPLB)",
    "leave out --enable-eplb",
    lambda config: config.parallel_config.enable_eplb,
)
RETURNED_EXPERTS = Rule("returning the chosen experts", "leave out --enable-return-routed-experts", returns_experts)
VALUES_APART = Rule(
    "keys and values of different sizes (MiMo-V2, openPangu with sinks)", ANOTHER_MODEL, of_model(sizes_values_apart)
)
MERGE_ADAPTER = "merge the adapter into the weights, and leave out --enable-lora"
has_experts = of_model(lambda model: model.is_moe)
ADAPTED_EXPERTS = Rule(
    "adapters (LoRA) for mixtures of experts",
    MERGE_ADAPTER,
    lambda config: has_experts(config) and given("lora_config")(config),
)

RULES: tuple[Rule, ...] = (
    # The model
    Rule("multi-head latent attention (MLA)", ANOTHER_MODEL, of_model(lambda model: model.use_mla)),
    Rule("Mamba, state-space and linear attention", ANOTHER_MODEL, of_model(lambda model: model.has_inner_state)),
    Rule("attention in chunks that look back (Rnj-1)", ANOTHER_MODEL, of_model(looks_back)),
    Rule("windows of generated tokens (R-SWA)", ANOTHER_MODEL, of_model(windows_generated_tokens)),
    Rule("square-root ALiBi (Step1)", ANOTHER_MODEL, of_model(has_square_root_alibi)),
    Rule("encoder-decoder models", ANOTHER_MODEL, of_model(lambda model: model.is_encoder_decoder)),
    SLEEP,
    CUMEM_ALLOCATOR,
    Rule("weight transfer", "leave out --weight-transfer-config", given("weight_transfer_config")),
    # Generating
    Rule("diffusion models", ANOTHER_MODEL, given("diffusion_config")),
    Rule("prompt embeddings", "leave out --enable-prompt-embeds", of_model(lambda model: model.enable_prompt_embeds)),
    Rule(
        "fp64 sampling noise",
        "leave out --use-fp64-gumbel",
        of_model(lambda model: getattr(model, "use_fp64_gumbel", False)),
    ),
    Rule(
        "batch invariance",
        "unset VLLM_BATCH_INVARIANT; seeded requests draw the same tokens in any batch as it is",
        lambda config: environment("VLLM_BATCH_INVARIANT"),
    ),
    Rule(
        "batch-sharded sampling",
        "leave out --enable-batch-sharded-sampling",
        lambda config: getattr(config.parallel_config, "enable_batch_sharded_sampling", False),
    ),
    # opset's sampler keeps processed logits only for requests that want log-probabilities, and a mask needs them.
    Rule(
        "sampling masks",
        "leave out --return-sampling-mask",
        of_model(lambda model: getattr(model, "return_sampling_mask", False)),
    ),
    Rule(
        "trace replay",
        "leave out --enable-trace-replay",
        of_model(lambda model: getattr(model, "enable_trace_replay", False)),
    ),
    # With a watermark vLLM takes its second model runner, regardless of VLLM_USE_V2_MODEL_RUNNER.
    Rule("watermarks", "leave out --watermark-config", given("watermark_config")),
    # The KV cache
    Rule("KV connectors", "leave out --kv-transfer-config", given("kv_transfer_config")),
    Rule("encoder cache connectors", "leave out --ec-transfer-config", given("ec_transfer_config")),
    Rule(
        "KV cache offloading",
        "leave out --kv-offloading-size, and make the cache larger by --gpu-memory-utilization",
        lambda config: config.cache_config.kv_offloading_size is not None,
    ),
    Rule(
        "fast prefill with a shared KV cache",
        "leave out --kv-sharing-fast-prefill",
        lambda config: config.cache_config.kv_sharing_fast_prefill,
    ),
    # Several processes
    Rule("pipeline parallelism", WIDER, several("pipeline_parallel_size")),
    Rule("data parallelism", WIDER, several("data_parallel_size")),
    EPLB,
    RETURNED_EXPERTS,
    Rule("prefill context parallelism", WIDER, several("prefill_context_parallel_size")),
    Rule("decode context parallelism", WIDER, several("decode_context_parallel_size")),
    Rule("several machines", "leave out --nnodes", several("nnodes")),
    Rule(
        "dual batch overlap (DBO)",
        "leave out --enable-dbo and --ubatch-size",
        two_batches,
    ),
    Rule("Ray", WITHOUT_RAY, lambda config: config.parallel_config.distributed_executor_backend == "ray"),
)


def _balances_load(arguments: "EngineArgs") -> bool:
    """Whether an engine is to be one of several that share the load."""
    shares = arguments.data_parallel_external_lb or arguments.data_parallel_hybrid_lb
    return arguments.data_parallel_size > 1 or shares


# Rules about EngineArgs, which vLLM checks before it makes a configuration of them.
ARGUMENTS: tuple[Rule, ...] = (
    Rule("data parallelism", WIDER, _balances_load),
    Rule(EPLB.feature, EPLB.cure, lambda arguments: arguments.enable_eplb),
    Rule("Ray", WITHOUT_RAY, lambda arguments: arguments.distributed_executor_backend == "ray"),
)
