"""The parts of opset that are on, on stock vLLM.

- attention: opset's attention backend, as by `--attention-backend CUSTOM`.
- sampler: one kernel for temperature, min-p, top-k, top-p and the draw.
- linear: layers with unquantised weights, with a kernel for batches of one row. If attention is on too, steps of up to
  2,048 tokens are captured in pieces (`platform/cuda/graphs.py`), so that they do not wait for the launch of linear's
  operator.
- ops: norms, activations and rotary embeddings, fused by hand. torch.compile is off then, unless users give a mode: the
  compiler sees each op as an operator, and nothing is fused by hand.

defaults.yaml lists the parts that are on by default on a GPU family. A part stays off for a configuration in which it
was not measured, or in which vLLM's own code is faster in some cases. Users override this by `--additional-config
'{"opset": {"native": {"attention": "on"}}}'`, by the key `native` of the file that OPSET_CONFIG names, or by
OPSET_NATIVE="attention=on,sampler=off". If a part that is on by default does not support the configuration, vLLM's own
code runs. If a user asked for the part, that is an error.
"""

import functools
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import yaml

from vllm_opset.model.weights import offloads
from vllm_opset.platform import settings, switches
from vllm_opset.platform.cuda import device
from vllm_opset.platform.early_rules import CACHE_LAYOUT, FLASHINFER_SAMPLER, TENSOR_DESCRIPTORS
from vllm_opset.platform.refusals import (
    Rule,
    caches_neither_alike_nor_in_fp8,
    environment,
    given,
    of_model,
    several,
    two_batches,
)
from vllm_opset.platform.switches import Switch
from vllm_opset.unsupported import Refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

STOCK_WORKER = "vllm.v1.worker.gpu_worker.Worker"
WORKER = "vllm_opset.platform.native.worker.OpsetNativeWorker"
WHERE = "on vLLM's own CUDA platform"
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


class Decision(NamedTuple):
    on: bool
    why: str


@dataclass(frozen=True)
class Part:
    """The rules of a part. unsupported: configurations that the part does not support.

    unmeasured: configurations in which it is off by default, but can be asked for. slower: the same, if vLLM's own code
    was measured to be faster in some cases. A rule in `slower` does not depend on the model or the configuration.
    """

    unsupported: tuple[Rule, ...]
    unmeasured: tuple[Rule, ...] = ()
    slower: tuple[Rule, ...] = ()


def _another_worker(config: "VllmConfig") -> bool:
    return config.parallel_config.worker_cls not in ("auto", STOCK_WORKER, WORKER)


def _our_backend(config: "VllmConfig") -> bool:
    backend = config.attention_config.backend
    return backend is not None and backend.name == "CUSTOM"


def _another_backend(config: "VllmConfig") -> bool:
    attention = config.attention_config
    named = attention.backend is not None and not _our_backend(config)
    # Such a setting is only meaningful for vLLM's own backend.
    return named or bool(OF_ANOTHER_BACKEND & set(settings.changed(config, "attention_config")))


def _flashinfer_samples(config: "VllmConfig | None") -> bool:
    """Whether vLLM's own sampler would be FlashInfer's. That is the default if FlashInfer is installed."""
    return environment("VLLM_USE_FLASHINFER_SAMPLER") and importlib.util.find_spec("flashinfer") is not None


def _another_linear_backend(config: "VllmConfig") -> bool:
    return config.kernel_config.linear_backend != "auto"


def _orders_ir_ops(config: "VllmConfig") -> bool:
    """Whether a user gave an order to the providers of IR ops. vLLM adds its platform's order to what the user gave."""
    from vllm.platforms import current_platform

    given = getattr(config.kernel_config, "ir_op_priority", None)  # vLLM removes its IR after 0.33
    if given is None or not any(vars(given).values()):
        return False
    return vars(given) != vars(current_platform.get_default_ir_op_priority(config))


def _offloads_cache(config: "VllmConfig") -> bool:
    return config.cache_config.kv_offloading_size is not None


def _caches_fp8(config: "VllmConfig") -> bool:
    return str(config.cache_config.cache_dtype).startswith("fp8")


def _soft_caps(model) -> bool:
    return bool(getattr(model.hf_text_config, "attn_logit_softcapping", None))


def _model(name: str) -> Callable[["VllmConfig"], bool]:
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
_QUANTISED = Rule("quantised weights", _LEAVE_IT_OUT, _model("quantization"))
_MOE = Rule("mixture-of-experts (MoE) models", _LEAVE_IT_OUT, _model("is_moe"))
_LORA = Rule("adapters (LoRA)", _LEAVE_IT_OUT, given("lora_config"))
_POOLING = Rule("pooling models", _LEAVE_IT_OUT, of_model(lambda model: model.runner_type == "pooling"))

# opset was compared with stock vLLM on one GPU, with unquantised dense language models. These were not compared.
_NOT_COMPARED = (
    _SPECULATIVE,
    _HYBRID,
    _ENCODER_DECODER,
    _MULTIMODAL,
    _QUANTISED,
    _MOE,
    _LORA,
    Rule("tensor parallelism", _LEAVE_IT_OUT, several("tensor_parallel_size")),
    Rule("pipeline parallelism", _LEAVE_IT_OUT, several("pipeline_parallel_size")),
    Rule("data parallelism", _LEAVE_IT_OUT, several("data_parallel_size")),
    Rule("two batches at a time (DBO)", _LEAVE_IT_OUT, two_batches),
)
# Parts that replace vLLM's layers were not measured in these configurations either.
_NOT_MEASURED = (
    *_NOT_COMPARED,
    _POOLING,
    Rule("multi-head latent attention (MLA)", _LEAVE_IT_OUT, _model("use_mla")),
)

PARTS: Mapping[str, Part] = {
    "attention": Part(
        unsupported=(
            _OTHER_WORKER,
            Rule("another attention backend", "leave out --attention-backend and --attention-config", _another_backend),
            Rule("multi-head latent attention (MLA)", _LEAVE_IT_OUT, _model("use_mla")),
            Rule("a KV cache in that dtype", "leave out --kv-cache-dtype", caches_neither_alike_nor_in_fp8),
            Rule("KV connectors", "leave out --kv-transfer-config", given("kv_transfer_config")),
            # vLLM makes a connector for it after the configuration is checked.
            Rule("KV cache offloading", "leave out --kv-offloading-size", _offloads_cache),
            Rule("decode context parallelism", _LEAVE_IT_OUT, several("decode_context_parallel_size")),
            Rule("prefill context parallelism", _LEAVE_IT_OUT, several("prefill_context_parallel_size")),
            CACHE_LAYOUT,
            *TENSOR_DESCRIPTORS,
            _BATCH_INVARIANT,
        ),
        unmeasured=(
            *_NOT_COMPARED,  # also, encoders of some multimodal models derive backends from vLLM's own only
            _POOLING,
            # For these, prompts run on another kernel than the one that was measured.
            Rule("an fp8 KV cache", _LEAVE_IT_OUT, _caches_fp8),
            Rule("soft-capped attention", _LEAVE_IT_OUT, of_model(_soft_caps)),
            Rule("ALiBi", _LEAVE_IT_OUT, _model("uses_alibi")),
            _FP32,
        ),
    ),
    "sampler": Part(
        unsupported=(
            _OTHER_WORKER,
            _POOLING,
            _SPECULATIVE,
            Rule("fp64 sampling noise", "leave out --use-fp64-gumbel", _model("use_fp64_gumbel")),
            Rule("sampling masks", "leave out --return-sampling-mask", _model("return_sampling_mask")),
            Rule("watermarks", "leave out --watermark-config", given("watermark_config")),
            Rule("diffusion models", _LEAVE_IT_OUT, given("diffusion_config")),
            *FLASHINFER_SAMPLER,
            _BATCH_INVARIANT,
        ),
        unmeasured=_NOT_COMPARED,
        # FlashInfer is faster for many rows in which top-p alone keeps many tokens (docs/log/wide-top-p.md).
        slower=(
            Rule("sampling where FlashInfer is installed", "set VLLM_USE_FLASHINFER_SAMPLER=0", _flashinfer_samples),
        ),
    ),
    "linear": Part(
        unsupported=(
            _OTHER_WORKER,
            Rule("weight offloading", "leave out --cpu-offload-gb and --offload-*, or switch this part off", offloads),
            Rule("another linear backend", "leave out --linear-backend", _another_linear_backend),
            _BATCH_INVARIANT,
        ),
        unmeasured=(*_NOT_MEASURED, _FP32),
    ),
    "ops": Part(
        unsupported=(
            _OTHER_WORKER,
            # opset's layers do not call the IR's ops.
            Rule("an order of IR ops", "leave out --ir-op-priority, or switch this part off", _orders_ir_ops),
            _BATCH_INVARIANT,
        ),
        unmeasured=_NOT_MEASURED,
    ),
}


def decide(config: "VllmConfig", family: int) -> dict[str, Decision]:
    """Whether each part is on, and why.

    family: the GPUs' compute capability, such as 90. Raises Refusal if a user asked for a part that does not support
    the configuration. Raises OverrideError for a setting that is not valid.
    """
    chosen = _switches(config)
    return {name: _decide(name, part, chosen.get(name), config, family) for name, part in PARTS.items()}


def is_asked_for(name: str, config: "VllmConfig") -> bool:
    """Whether a user has switched the part on."""
    switch = _switches(config).get(name)
    return switch is not None and switch.on


def decide_without_model(family: int) -> dict[str, Decision]:
    """The result of `decide` by variables and files alone, for a model and configuration that all parts support."""
    chosen = switches.read({})
    return {
        name: Decision(*chosen[name]) if name in chosen else _by_default(name, family, PARTS[name].slower)
        for name in PARTS
    }


@functools.cache
def defaults() -> Mapping[str, Mapping[str, object]]:
    return yaml.safe_load(Path(__file__).with_name("defaults.yaml").read_text())


def _switches(config: "VllmConfig") -> dict[str, Switch]:
    """The user's switch of each part that has one; a later source overrides an earlier one."""
    backend = {"attention": Switch(True, "--attention-backend CUSTOM")} if _our_backend(config) else {}
    return backend | switches.read(config.additional_config)


def _decide(name: str, part: Part, switch: Switch | None, config: "VllmConfig", family: int) -> Decision:
    if switch is not None and not switch.on:
        return Decision(False, f"switched off by {switch.source}")
    if switch is not None:
        if divmod(family, 10) < device.OLDEST:
            raise Refusal(f"vllm-opset's {name} needs {device.NEEDED}: switch it off.")
        if rule := _first(part.unsupported, config):
            raise rule.refusal(f"({name}) {WHERE}")
        return Decision(True, f"asked for by {switch.source}")
    return _by_default(name, family, (*part.unsupported, *part.unmeasured, *part.slower), config)


def _by_default(name: str, family: int, rules: tuple[Rule, ...], config: "VllmConfig | None" = None) -> Decision:
    """Whether a part is on if no user sets it: if it was measured to be faster, and none of the rules applies."""
    row = defaults().get(f"sm{family}", {})
    if not row.get(name):
        return Decision(False, f"not measured to be faster on GPUs of compute capability {family // 10}.{family % 10}")
    if why_not := _first(rules, config):
        return Decision(False, f"vLLM's own serves {why_not.feature}")
    return Decision(True, f"faster by {row['measured']}")


def _first(rules: tuple[Rule, ...], config: "VllmConfig | None") -> Rule | None:
    return next((rule for rule in rules if rule.applies(config)), None)
