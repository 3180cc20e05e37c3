"""The rules of the parts of opset on stock vLLM: what a part does not support, or needs evidence for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm_opset.model.weights import offloads
from vllm_opset.platform import drafts, early_rules, multimodal, settings
from vllm_opset.platform.quantised_weights import GPT_OSS, in_fp8
from vllm_opset.platform.refusals import (
    EPLB,
    EXPERT_PARALLELISM,
    RETURNED_EXPERTS,
    Rule,
    caches_neither_alike_nor_in_fp8,
    environment,
    given,
    has_square_root_alibi,
    looks_back,
    of_model,
    several,
    two_batches,
    windows_generated_tokens,
)
from vllm_opset.platform.switches import PARTS, ByPart

if TYPE_CHECKING:
    from vllm.config import VllmConfig

STOCK_WORKER = "vllm.v1.worker.gpu_worker.Worker"
WORKER = "vllm_opset.platform.native.worker.OpsetNativeWorker"
WHERE = "on vLLM's own CUDA platform"
# A kind of attention layers, not of models: the platform decides on each layer (`platform.py`).
SINKS = "attention sinks"
# Settings of vLLM's own attention backends. Settings for MLA are not among them, because the part leaves MLA to vLLM.
OF_ANOTHER_BACKEND = frozenset(
    {
        "backend_per_kind",
        "disable_flashinfer_q_quantization",
        "flash_attn_max_num_splits_for_cuda_graph",
        "flash_attn_version",
        "flex_attn_block_m",
        "flex_attn_block_n",
        "flex_attn_kv_block_size",
        "flex_attn_q_block_size",
        "tq_max_kv_splits_for_cuda_graph",
        "use_prefill_decode_attention",
        "use_trtllm_attention",
    }
)


@dataclass(frozen=True)
class PartRules:
    """The rules of a part. unsupported: configurations that the part does not support.

    kinds: configurations that need evidence of their own (`evidence`). Without it, the part is off by default, and
    users can ask for it.
    """

    unsupported: tuple[Rule, ...]
    kinds: tuple[Rule, ...] = ()


def _another_worker(config: "VllmConfig") -> bool:
    return config.parallel_config.worker_cls not in ("auto", STOCK_WORKER, WORKER)


def is_ours(backend) -> bool:
    """Whether a user named opset's attention. backend: a member of vLLM's enum of backends, or None."""
    return backend is not None and backend.name == "CUSTOM"


def _another_backend(config: "VllmConfig") -> bool:
    attention = config.attention_config
    named = attention.backend is not None and not is_ours(attention.backend)
    # Such a setting is only meaningful for vLLM's own backend.
    return named or bool(OF_ANOTHER_BACKEND & set(settings.changed(config, "attention_config")))


def _another_linear_backend(config: "VllmConfig") -> bool:
    return config.kernel_config.linear_backend != "auto"


def _maps_quantised_weights(config: "VllmConfig") -> bool:
    """Whether another process hands over quantised weights in the layout of vLLM's kernels, which are not processed."""
    return config.load_config.load_format == "ipc_cache" and of_model(lambda model: model.quantization)(config)


def _another_moe_backend(config: "VllmConfig") -> bool:
    return config.kernel_config.moe_backend != "auto"


def _has_no_experts(config: "VllmConfig") -> bool:
    return config.model_config is not None and not config.model_config.is_moe


def _orders_ir_ops(config: "VllmConfig") -> bool:
    """Whether a user gave an order to the providers of IR ops. vLLM adds its platform's order after it is asked."""
    given = getattr(config.kernel_config, "ir_op_priority", None)  # vLLM removes its IR after 0.33
    return given is not None and any(vars(given).values())


def _offloads_cache(config: "VllmConfig") -> bool:
    return config.cache_config.kv_offloading_size is not None


def _caches_fp8(config: "VllmConfig") -> bool:
    return str(config.cache_config.cache_dtype).startswith("fp8")


def _in_mxfp4(model) -> bool:
    return model.quantization == GPT_OSS


def _weights_otherwise_quantised(model) -> bool:
    return model.quantization is not None and not in_fp8(model) and not _in_mxfp4(model)


def _drafts(kind: str | None) -> Callable[["VllmConfig"], bool]:
    """Whether tokens are drafted in a way of this kind; None stands for a method that was not tried."""
    return lambda config: config.speculative_config is not None and drafts.KINDS.get(drafts.method(config)) == kind


def _soft_caps(model) -> bool:
    return bool(getattr(model.hf_text_config, "attn_logit_softcapping", None))


def _head_sizes_differ(model) -> bool:
    """Whether layers have heads of several sizes, for which vLLM chooses among its own backends by itself."""
    config = model.hf_text_config
    sizes = {getattr(layer, "head_dim", None) for layer in getattr(config, "per_layer_config", ())}
    other = getattr(config, "global_head_dim", None)  # in releases of transformers without settings by layer
    return len(sizes) > 1 or other not in (None, getattr(config, "head_dim", None))


def _model(name: str) -> Callable[["VllmConfig"], bool]:
    """Whether an attribute of the model's configuration is true. It is false in releases that lack the attribute."""
    return of_model(lambda model: getattr(model, name, False))


_LEAVE_IT_OUT = "switch this part off, or leave that out"
_OTHER_WORKER = Rule("another worker class", "leave out --worker-cls", _another_worker)
_SPECULATIVE = Rule("speculative decoding", _LEAVE_IT_OUT, given("speculative_config"))
_BATCH_INVARIANT = Rule(
    "batch invariance", "unset VLLM_BATCH_INVARIANT", lambda config: environment("VLLM_BATCH_INVARIANT")
)
_HYBRID = Rule("Mamba, state-space and linear attention", _LEAVE_IT_OUT, _model("has_inner_state"))
_ENCODER_DECODER = Rule("encoder-decoder models", _LEAVE_IT_OUT, _model("is_encoder_decoder"))
_FP32 = Rule("fp32", _LEAVE_IT_OUT, of_model(lambda model: model.dtype == torch.float32))
_MULTIMODAL = Rule("multimodal models", _LEAVE_IT_OUT, _model("is_multimodal_model"))
_QUANTISED = (
    Rule("fp8 weights", _LEAVE_IT_OUT, of_model(in_fp8)),
    Rule("gpt-oss's MXFP4 weights", _LEAVE_IT_OUT, of_model(_in_mxfp4)),
    Rule("weights in other quantised formats", _LEAVE_IT_OUT, of_model(_weights_otherwise_quantised)),
)
_MOE = Rule("mixture-of-experts (MoE) models", _LEAVE_IT_OUT, _model("is_moe"))
_LORA = Rule("adapters (LoRA)", _LEAVE_IT_OUT, given("lora_config"))
_POOLING = Rule("pooling models", _LEAVE_IT_OUT, of_model(lambda model: model.runner_type == "pooling"))
_MLA = Rule("multi-head latent attention (MLA)", _LEAVE_IT_OUT, _model("use_mla"))
_DATA_PARALLEL = Rule("data parallelism", _LEAVE_IT_OUT, several("data_parallel_size"))
_TWO_BATCHES = Rule("dual batch overlap (DBO)", _LEAVE_IT_OUT, two_batches)
_PREFILL_CONTEXT = Rule("prefill context parallelism", _LEAVE_IT_OUT, several("prefill_context_parallel_size"))
_OFFLOADS = Rule("weight offloading", "leave out --cpu-offload-gb and --offload-*, or switch this part off", offloads)

# opset was first compared with stock vLLM on one GPU, with unquantised language models without experts. Each of these
# kinds of models and engines needs evidence of its own.
_DRAFTS = (
    *(Rule(kind, _LEAVE_IT_OUT, _drafts(kind)) for kind in dict.fromkeys(drafts.KINDS.values())),
    Rule("drafts by other methods", _LEAVE_IT_OUT, _drafts(None)),
)
_OTHER_KINDS = (
    _HYBRID,
    _ENCODER_DECODER,
    _MULTIMODAL,
    *_QUANTISED,
    _MOE,
    _LORA,
    Rule("tensor parallelism of 2", _LEAVE_IT_OUT, lambda config: config.parallel_config.tensor_parallel_size == 2),
    Rule(
        "tensor parallelism of more than 2",
        _LEAVE_IT_OUT,
        lambda config: config.parallel_config.tensor_parallel_size > 2,
    ),
    Rule("pipeline parallelism", _LEAVE_IT_OUT, several("pipeline_parallel_size")),
    _DATA_PARALLEL,
    _TWO_BATCHES,
)
_COMMON_KINDS = (*_DRAFTS, *_OTHER_KINDS)
# Parts that replace vLLM's layers need it for these, too.
_KINDS_OF_LAYERS = (*_COMMON_KINDS, _POOLING, _MLA)

RULES: Mapping[str, PartRules] = ByPart(
    attention=PartRules(
        unsupported=(
            _OTHER_WORKER,
            Rule("another attention backend", "leave out --attention-backend and --attention-config", _another_backend),
            _MLA,
            # All layers of such a model ask for this attention, and opset's does not have it.
            Rule(multimodal.PREFIX_LMS, _LEAVE_IT_OUT, _model("is_mm_prefix_lm")),
            Rule(multimodal.POOLED_CACHES, _LEAVE_IT_OUT, of_model(multimodal.pools_cache)),
            Rule("attention in chunks that look back (Rnj-1)", _LEAVE_IT_OUT, of_model(looks_back)),
            Rule("windows of generated tokens (R-SWA)", _LEAVE_IT_OUT, of_model(windows_generated_tokens)),
            Rule("square-root ALiBi (Step1)", _LEAVE_IT_OUT, of_model(has_square_root_alibi)),
            Rule(
                "a KV cache in a dtype other than the model's and fp8 e4m3",
                "leave out --kv-cache-dtype",
                caches_neither_alike_nor_in_fp8,
            ),
            Rule("KV connectors", "leave out --kv-transfer-config", given("kv_transfer_config")),
            # vLLM makes a connector for it after the configuration is checked.
            Rule("KV cache offloading", "leave out --kv-offloading-size", _offloads_cache),
            Rule("decode context parallelism", _LEAVE_IT_OUT, several("decode_context_parallel_size")),
            _PREFILL_CONTEXT,
            early_rules.CACHE_LAYOUT,
            *early_rules.TENSOR_DESCRIPTORS,
            _BATCH_INVARIANT,
        ),
        kinds=(
            *_COMMON_KINDS,
            _POOLING,
            # For these, prompts run on another kernel than the one that was measured.
            Rule("an fp8 KV cache", _LEAVE_IT_OUT, _caches_fp8),
            Rule("soft-capped attention", _LEAVE_IT_OUT, of_model(_soft_caps)),
            Rule("ALiBi", _LEAVE_IT_OUT, _model("uses_alibi")),
            Rule("layers with different head sizes (Gemma-4)", _LEAVE_IT_OUT, of_model(_head_sizes_differ)),
            _FP32,
        ),
    ),
    sampler=PartRules(
        unsupported=(
            _OTHER_WORKER,
            _POOLING,
            _SPECULATIVE,
            Rule("fp64 sampling noise", "leave out --use-fp64-gumbel", _model("use_fp64_gumbel")),
            Rule("sampling masks", "leave out --return-sampling-mask", _model("return_sampling_mask")),
            Rule("watermarks", "leave out --watermark-config", given("watermark_config")),
            Rule("diffusion models", _LEAVE_IT_OUT, given("diffusion_config")),
            *early_rules.FLASHINFER_SAMPLER,
            _BATCH_INVARIANT,
        ),
        kinds=_OTHER_KINDS,
    ),
    linear=PartRules(
        unsupported=(
            _OTHER_WORKER,
            _OFFLOADS,
            Rule("another linear backend", "leave out --linear-backend", _another_linear_backend),
            Rule(
                "quantised weights of another process",
                "leave out --load-format ipc_cache, or switch this part off",
                _maps_quantised_weights,
            ),
            # FBGEMM's checkpoints limit the scales of activations.
            Rule(
                "FBGEMM's fp8 weights",
                "switch this part off",
                of_model(lambda model: model.quantization == "fbgemm_fp8"),
            ),
            *early_rules.MARLIN_INPUTS,
            _BATCH_INVARIANT,
        ),
        kinds=(*_KINDS_OF_LAYERS, _FP32),
    ),
    ops=PartRules(
        unsupported=(
            _OTHER_WORKER,
            # opset's layers do not call the IR's ops.
            Rule("a priority of IR ops", "leave out --ir-op-priority, or switch this part off", _orders_ir_ops),
            # The part switches torch.compile off unless users give a mode.
            early_rules.LEVELS,
            early_rules.PASSES,
            _BATCH_INVARIANT,
        ),
        kinds=_KINDS_OF_LAYERS,
    ),
    moe=PartRules(
        unsupported=(
            _OTHER_WORKER,
            Rule("models without experts", "switch this part off", _has_no_experts),
            Rule("another backend for experts", "leave out --moe-backend", _another_moe_backend),
            # vLLM adds adapters to the products of its own kernels.
            _LORA,
            # Tokens go to experts of other engines and back within vLLM's own kernels.
            _DATA_PARALLEL,
            _PREFILL_CONTEXT,
            _TWO_BATCHES,
            # vLLM's router counts, moves, records or draws the chosen experts, and the part has a router of its own.
            EPLB,
            RETURNED_EXPERTS,
            *early_rules.SIMULATED_ROUTING,
            *early_rules.MARLIN_INPUTS,
            _OFFLOADS,
            _BATCH_INVARIANT,
        ),
        kinds=(
            *(kind for kind in _KINDS_OF_LAYERS if kind not in (_MOE, _LORA, _DATA_PARALLEL, _TWO_BATCHES)),
            Rule("expert parallelism", _LEAVE_IT_OUT, EXPERT_PARALLELISM.applies),
            _FP32,
        ),
    ),
)._asdict()

# Parts whose kernels run within the model. torch.compile traces through their layers, and the warm-up calls them.
IN_THE_MODEL = frozenset(PARTS) - {"sampler"}
