"""The features that opset does not support on a CPU."""

from typing import TYPE_CHECKING

from vllm_opset.model.weights import offloads
from vllm_opset.platform import draft_rules, drafts, multimodal, second_runner
from vllm_opset.platform.cpu import threads
from vllm_opset.platform.early_rules import EARLY_RULES as COMMON_EARLY_RULES
from vllm_opset.platform.early_rules import NVTX, PROFILERS, SIMULATED_ROUTING, WITHOUT_COMPILER, unset
from vllm_opset.platform.quantised_weights import FP8_OF_GPT_OSS, QUANTISED_WEIGHTS
from vllm_opset.platform.refusals import (
    ADAPTED_EXPERTS,
    VALUES_APART,
    Rule,
    Settings,
    caches_in_another_dtype,
    captures,
    compiles,
    environment,
)
from vllm_opset.platform.refusals import RULES as COMMON

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig


def _verifies_otherwise(config: "SpeculativeConfig") -> bool:
    return config.rejection_sample_method != "standard" or config.enable_adaptive_verification


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

OF_ITS_OWN = (*draft_rules.BACKENDS, "kv_cache_dtype")
# vLLM takes its first runner for these.
FOR_FIRST_RUNNER = ("parallel_drafting", "use_heterogeneous_vocab")


def _may_adapt_head(config: "VllmConfig") -> bool:
    """Whether an adapter may have matrices for the LM head."""
    lora = config.lora_config
    return lora is not None and (lora.target_modules is None or any("lm_head" in name for name in lora.target_modules))


DRAFTS = (
    draft_rules.ANOTHER_METHOD,
    Rule(
        "speculative decoding before vLLM 0.32",
        "take a later release, or leave out --speculative-config",
        lambda config: drafts.method(config) is not None and not second_runner.drafts_without_triton(),
    ),
    Rule(
        "parallel drafting, or a model that drafts with another vocabulary",
        f"leave {' and '.join(FOR_FIRST_RUNNER)} out of --speculative-config",
        lambda config: any(draft_rules.given(config, FOR_FIRST_RUNNER)),
    ),
    Rule(
        "speculative decoding with vLLM's first model runner",
        "unset VLLM_USE_V2_MODEL_RUNNER, or leave out --speculative-config",
        lambda config: drafts.method(config) is not None and not config.use_v2_model_runner,
    ),
    # vLLM names one adapter for the logits of a request, also where it verifies several tokens of it.
    Rule(
        "speculative decoding beside adapters (LoRA) of the LM head",
        "give --lora-target-modules without lm_head, or leave out --speculative-config",
        lambda config: drafts.method(config) is not None and _may_adapt_head(config),
    ),
    draft_rules.QUANTISED_OTHERWISE,
    Rule(
        "another backend, KV cache or LM head for a model that drafts",
        f"leave {', '.join(OF_ITS_OWN)} out of --speculative-config",
        lambda config: draft_rules.differs(config, OF_ITS_OWN),
    ),
    Rule(
        "MTP by several modules",
        "give num_speculative_tokens 1 in --speculative-config, or draft by ngram",
        lambda config: drafts.method(config) == "mtp" and config.speculative_config.use_multi_module_mtp(),
    ),
    Rule(
        "drafts that a model draws by their probability",
        "leave draft_sample_method out of --speculative-config",
        lambda config: drafts.method(config) is not None and config.speculative_config.draft_sample_method != "greedy",
    ),
    Rule(
        "other ways to verify drafts than vLLM's standard one",
        "leave rejection_sample_method and enable_adaptive_verification out of --speculative-config",
        lambda config: drafts.method(config) is not None and _verifies_otherwise(config.speculative_config),
    ),
)

RULES: tuple[Rule, ...] = (
    QUANTISED_WEIGHTS,
    FP8_OF_GPT_OSS,
    *COMMON,
    *multimodal.RULES,
    VALUES_APART,
    second_runner.UNAVAILABLE,
    ADAPTED_EXPERTS,
    Rule(
        "weight offloading",
        "leave out --cpu-offload-gb and --offload-*: the weights are in the CPU's memory",
        offloads,
    ),
    *DRAFTS,
    Rule(
        "torch.compile",
        "leave the mode out of --compilation-config, or give --enforce-eager",
        compiles,
    ),
    Rule("a KV cache in another dtype than the model's", "leave out --kv-cache-dtype", caches_in_another_dtype),
)
