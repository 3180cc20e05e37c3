"""The out-of-tree vLLM platform whose device is an Ascend NPU, for a vLLM without compiled kernels."""

import os
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger

from vllm_opset import targets
from vllm_opset.platform import second_runner
from vllm_opset.platform.base import OpsetPlatform
from vllm_opset.platform.npu import refusals
from vllm_opset.platform.refusals import captures

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")


class OpsetNpuPlatform(OpsetPlatform):
    device_name = "npu"
    device_type = "npu"
    dispatch_key = "PrivateUse1"
    ray_device_key = "NPU"
    device_control_env_var = "ASCEND_RT_VISIBLE_DEVICES"
    dist_backend = "hccl"
    # For vLLM's small compiled helpers: Inductor would need Triton for NPUs.
    simple_compile_backend = "eager"
    where = "on an NPU"
    early_rules = refusals.EARLY_RULES
    rules = refusals.RULES
    worker = "vllm_opset.platform.npu.worker.OpsetNpuWorker"
    attention_backend = "vllm_opset.platform.npu.attention.NpuAttentionBackend"

    @classmethod
    def prepare(cls) -> None:
        super().prepare()
        second_runner.configure_without_triton()

    @classmethod
    def why_no_second_runner(cls) -> str | None:
        return second_runner.why_none()

    # Configuration

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        super().check_and_update_config(vllm_config)
        if torch.npu.is_initialized():
            # vLLM does the same for GPUs: a process that is forked from this one could not use the NPU.
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: "VllmConfig") -> None:
        super().apply_config_platform_defaults(vllm_config)
        cls.compile_and_capture_nothing(vllm_config)
        if captures(vllm_config):
            logger.warning("vllm-opset has never run graphs on an Ascend NPU: what follows is untested there")

    # Graphs

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        """vLLM captures the NPU's graphs as CUDA graphs: see `npu/graphs.py`."""
        return True

    def get_global_graph_pool(self) -> tuple[int, int]:
        """A new pool for each engine of a process: torch_npu does not reuse a pool whose graphs are gone."""
        return self.graph_pool_handle()

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        if quant != refusals.METHOD:
            raise refusals.QUANTISED_WEIGHTS.of(f"the method {quant}", cls.where)

    # The device. Methods that may run before an engine's processes start must not initialise it: see above.

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        from vllm_opset.kernels.ascend._constraints import BF16_SOCS

        if dtype == torch.bfloat16 and targets.of("npu").architecture not in BF16_SOCS:
            raise ValueError(f"there is no bfloat16 on {torch.npu.get_device_name()}: give --dtype float16")

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        torch.npu.set_device(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        torch.npu.manual_seed_all(seed)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return torch.npu.get_device_name(device_id) if torch.npu.is_initialized() else "Ascend NPU"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        if not torch.npu.is_initialized():
            raise RuntimeError("this process does not use the NPU")
        return torch.npu.get_device_properties(device_id).total_memory

    @classmethod
    def get_current_memory_usage(cls, device: torch.types.Device | None = None) -> float:
        torch.npu.empty_cache()
        torch.npu.reset_peak_memory_stats(device)
        return torch.npu.max_memory_allocated(device)

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return torch.npu.get_device_properties(device_id).cube_core_num

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """Accept several attention layers at one place in the model. vLLM asks for this since 0.28."""
