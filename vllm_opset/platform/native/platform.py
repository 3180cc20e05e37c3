"""vLLM's own CUDA platform, with its compiled kernels and all of its features.

If every part (`parts`) is off, it serves exactly like vLLM. An engine still starts where vLLM's would wait forever,
in a process that has used OpenMP threads (`platform/forking.py`).
"""

from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger
from vllm.platforms.cuda import CudaPlatform

from vllm_opset import ops, selection
from vllm_opset.attention import BACKEND
from vllm_opset.platform import compat, forking, model_settings, overridden
from vllm_opset.platform.cuda import graphs
from vllm_opset.platform.native import parts
from vllm_opset.platform.native.rules import SINKS, STOCK_WORKER, WHERE, WORKER, is_ours
from vllm_opset.platform.refusals import Refusal, wants_quick_start

if TYPE_CHECKING:
    from vllm.config import VllmConfig

USUAL_BLOCK_SIZE = 16  # no kernel depends on it

logger = init_logger(f"vllm.{__name__}")


class OpsetNativePlatform(CudaPlatform):
    """A subclass of `vllm.platforms.cuda.CudaPlatform`, whose `_enum` stays CUDA."""

    attention_backend = BACKEND
    where = WHERE

    @classmethod
    def pre_register_and_update(cls, parser=None) -> None:
        super().pre_register_and_update(parser)
        model_settings.take_back()

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: "VllmConfig") -> None:
        from vllm.config import CompilationMode, CUDAGraphMode

        super().apply_config_platform_defaults(vllm_config)
        model_settings.leave_to_vllm(vllm_config, model_settings.CAPTURED_SIZES)
        graphs.note_named_sizes(vllm_config)
        for name, part in parts.decide_once(vllm_config, cls.get_device_capability().to_int()).items():
            logger.info_once(f"vllm-opset's {name} is {'on' if part.on else 'off'}: {part.why}")
        compilation, on = vllm_config.compilation_config, parts.kept(vllm_config)
        if "attention" not in on:
            model_settings.leave_to_vllm(vllm_config, model_settings.ATTENTION)
        if "ops" not in on:
            return
        if compilation.mode is None:
            compilation.mode = CompilationMode.NONE
            if compilation.cudagraph_mode is None and not wants_quick_start(vllm_config):
                compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
        # vLLM names single ops for some weights before it asks, and would add "none" where it compiles.
        if not {"all", "none"} & set(compilation.custom_ops):
            compilation.custom_ops = [*compilation.custom_ops, "all"]

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        overrides = selection.configure(vllm_config.additional_config)
        selection.require_device(cls.device_type)
        on, parallel = parts.kept(vllm_config), vllm_config.parallel_config
        if vllm_config.model_config is not None:
            for message in overridden.without_effect(overrides, on):
                logger.warning_once(message)
        forking.make_safe()
        compat.forget_chosen_attention()
        if on and parallel.worker_cls in ("auto", STOCK_WORKER):
            parallel.worker_cls = WORKER
        super().check_and_update_config(vllm_config)
        # Launching the kernels of attention and linear takes Python longer than launching vLLM's own. Without opset's
        # attention, FlashAttention would allocate memory for 32 splits of every step up to the longest captured size.
        if "attention" in on:
            graphs.capture_longer_steps(vllm_config)

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads: int | None = None) -> str:
        from vllm.config import get_current_vllm_config

        config = get_current_vllm_config()
        named = selected_backend is not None  # by a user, also for the draft model alone, or by vLLM for a model
        if "attention" not in parts.kept(config) or (named and not is_ours(selected_backend)):
            return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
        reasons = _why_not(attn_selector_config, num_heads, cls.get_device_capability())
        family = cls.get_device_capability().to_int()
        if attn_selector_config.has_sink and not parts.is_wanted("attention", SINKS, config, family):
            reasons = [*reasons, f"it was not measured to be faster with {SINKS}"]
        if not reasons:
            return BACKEND
        if named:
            raise Refusal(f"vllm-opset's attention cannot serve a layer of this model: {', '.join(reasons)}.")
        logger.info_once(f"vLLM's own attention serves some layers, since vllm-opset's does not: {', '.join(reasons)}")
        return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)


def _why_not(wanted, num_heads: int | None, capability) -> list[str]:
    """The reasons why opset's attention cannot serve a layer; empty if it can."""
    from vllm_opset.attention.backend import OpsetAttentionBackend

    reasons = OpsetAttentionBackend.validate_configuration(device_capability=capability, **wanted._asdict())
    if reasons:
        return reasons
    heads = num_heads or 1
    quantised = str(wanted.kv_cache_dtype).startswith("fp8")
    problem = ops.paged_attention.problem(
        device="cuda",
        dtype=wanted.dtype,
        kv_cache_dtype=torch.float8_e4m3fn if quantised else wanted.dtype,
        num_heads=heads,
        num_kv_heads=heads,
        head_size=wanted.head_size,
        block_size=wanted.block_size or USUAL_BLOCK_SIZE,
    )
    no_kernel = selection.why_no_kernel(ops.paged_attention, problem)
    return [no_kernel] if no_kernel else []
