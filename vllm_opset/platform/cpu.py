"""The platform: an out-of-tree vLLM platform whose device is the CPU, for a vLLM without compiled kernels."""

import os
from typing import TYPE_CHECKING

import psutil
import torch
from vllm.logger import init_logger
from vllm.platforms.interface import Platform, PlatformEnum

from vllm_opset import selection
from vllm_opset.platform import compat, machine, refusals, threads

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.kernel import IrOpPriorityConfig

logger = init_logger(f"vllm.{__name__}")

ATTENTION_BACKEND = "vllm_opset.attention.backend.OpsetAttentionBackend"
WORKER = "vllm_opset.platform.worker.OpsetCpuWorker"


class OpsetCpuPlatform(Platform):
    """See `vllm.platforms.interface.Platform` for what each hook means."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    # For vLLM's small compiled helpers: "inductor" would need a C++ compiler, and there may be none.
    simple_compile_backend = "eager"

    def __init__(self) -> None:
        compat.without_accelerator()
        threads.make_forking_safe()

    # Configuration

    @classmethod
    def pre_register_and_update(cls, parser=None) -> None:
        # vLLM's second model runner consists of Triton kernels.
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
        threads.remember_users_choice()

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: "VllmConfig") -> None:
        from vllm.config import CompilationMode, CUDAGraphMode

        refusals.check_asked(vllm_config)
        compilation = vllm_config.compilation_config
        if compilation.mode is None:
            compilation.mode = CompilationMode.NONE
        if compilation.cudagraph_mode is None:
            compilation.cudagraph_mode = CUDAGraphMode.NONE
        # Passes of the compiler, which vLLM would announce as enabled.
        for fusion in ("fuse_norm_quant", "fuse_act_quant"):
            if getattr(compilation.pass_config, fusion) is None:
                setattr(compilation.pass_config, fusion, False)

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        refusals.check(vllm_config)
        selection.configure(vllm_config.additional_config)
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = WORKER
        vllm_config.parallel_config.disable_custom_all_reduce = True
        cls._schedule_in_step(vllm_config.scheduler_config)
        if vllm_config.model_config is not None:
            vllm_config.model_config.disable_cascade_attn = True

    @classmethod
    def _schedule_in_step(cls, scheduler_config) -> None:
        """Said, not refused: vLLM has resolved its default by now, and that looks like what a user asked for."""
        if scheduler_config.async_scheduling:
            logger.info_once(
                "Asynchronous scheduling is off: the CPU that it would free of waiting is the device itself"
            )
        scheduler_config.async_scheduling = False

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        raise refusals.Refusal(str(refusals.QUANTISED_WEIGHTS))

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    # Kernels and layers

    @classmethod
    def import_kernels(cls) -> None:
        """There are no compiled kernels to import."""

    @classmethod
    def import_ir_kernels(cls) -> None:
        super().import_ir_kernels()
        from vllm_opset.platform import ir

        ir.register()

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: "VllmConfig") -> "IrOpPriorityConfig":
        from vllm_opset.platform import ir

        ir.register()
        return ir.priority()

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads: int | None = None) -> str:
        refusals.check_attention(selected_backend, attn_selector_config)
        return ATTENTION_BACKEND

    @classmethod
    def opaque_attention_op(cls) -> bool:
        """Attention is called directly, not through a custom op: nothing is compiled, and the detour costs time."""
        return False

    # The device

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "cpu"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return machine.memory().total

    @classmethod
    def get_current_memory_usage(cls, device: torch.types.Device | None = None) -> float:
        return psutil.Process().memory_info().rss

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return torch.get_num_threads()

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """There is one device."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """torch.manual_seed, which vLLM calls besides, is all there is."""
