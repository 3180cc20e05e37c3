"""The out-of-tree vLLM platform whose device is the CPU, for a vLLM without compiled kernels."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import psutil
import torch
from vllm.logger import init_logger

from vllm_opset.platform import compat, quantised_weights, second_runner
from vllm_opset.platform.base import OpsetPlatform
from vllm_opset.platform.cpu import kv_memory, machine, refusals, threads

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")


class OpsetCpuPlatform(OpsetPlatform):
    device_name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    # For vLLM's small compiled helpers: "inductor" would need a C++ compiler, which may be missing.
    simple_compile_backend = "eager"
    where = "on a CPU"
    early_rules = refusals.EARLY_RULES
    rules = refusals.RULES
    worker = "vllm_opset.platform.cpu.worker.OpsetCpuWorker"

    def __init__(self) -> None:
        super().__init__()
        compat.without_accelerator()

    @classmethod
    def prepare(cls) -> None:
        super().prepare()
        second_runner.configure_without_triton()

    @classmethod
    def why_no_second_runner(cls) -> str | None:
        return second_runner.why_none()

    # Configuration

    @classmethod
    def pre_register_and_update(cls, parser=None) -> None:
        super().pre_register_and_update(parser)
        threads.remember_users_choice()

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: "VllmConfig") -> None:
        super().apply_config_platform_defaults(vllm_config)
        cls.compile_and_capture_nothing(vllm_config)

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        super().check_and_update_config(vllm_config)
        cls._schedule_in_step(vllm_config.scheduler_config)

    @classmethod
    def check_additional_config(cls, additional_config: Mapping) -> None:
        super().check_additional_config(additional_config)
        # Checked here, because an error would be hard to find in the workers, which set threads and memory.
        threads.users_choice()
        kv_memory.users_choice()

    @classmethod
    def _schedule_in_step(cls, scheduler_config) -> None:
        """Switch asynchronous scheduling off, and log that. It may be vLLM's default, and is therefore not refused."""
        if scheduler_config.async_scheduling:
            logger.info_once(
                "Asynchronous scheduling is off: the CPU that it would free of waiting is the device itself"
            )
        scheduler_config.async_scheduling = False

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        quantised_weights.verify(quant, cls.where)

    @classmethod
    def get_punica_wrapper(cls) -> str:
        return "vllm_opset.model.adapters.OpsetPunicaWrapper"

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
        """Do nothing, because there is only one device."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Do nothing, because vLLM also calls torch.manual_seed, which seeds the only device."""
