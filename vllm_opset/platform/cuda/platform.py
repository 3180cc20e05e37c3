"""The out-of-tree vLLM platform whose device is an NVIDIA GPU, for a vLLM without compiled kernels."""

from typing import TYPE_CHECKING

import torch

from vllm_opset.platform import compat, quantised_weights, refusals
from vllm_opset.platform.base import OpsetPlatform
from vllm_opset.platform.cuda import graphs, nvml
from vllm_opset.platform.cuda.refusals import EARLY_RULES, RULES

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.kernel import IrOpPriorityConfig


class OpsetCudaPlatform(OpsetPlatform):
    device_name = "cuda"
    device_type = "cuda"
    dispatch_key = "CUDA"
    ray_device_key = "GPU"
    device_control_env_var = "CUDA_VISIBLE_DEVICES"
    dist_backend = "nccl"
    where = "on a GPU, with a vLLM that has no compiled kernels,"
    early_rules = EARLY_RULES
    rules = RULES
    worker = "vllm_opset.platform.cuda.worker.OpsetCudaWorker"

    # Configuration

    @classmethod
    def pre_register_and_update(cls, parser=None) -> None:
        super().pre_register_and_update(parser)
        graphs.take_back()
        compat.ask_before_graphs_are_chosen(graphs.ask_for_piecewise)

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: "VllmConfig") -> None:
        from vllm.config import CompilationMode

        super().apply_config_platform_defaults(vllm_config)
        graphs.note_named_sizes(vllm_config)
        compilation = vllm_config.compilation_config
        if compilation.mode is None:
            compilation.mode = CompilationMode.NONE
        if compilation.cudagraph_mode is None and compilation.mode == CompilationMode.NONE:
            compilation.cudagraph_mode = graphs.default(vllm_config)
        graphs.ask_for_piecewise(vllm_config)  # up to 0.28, vLLM reads the variable after this
        if compilation.mode == CompilationMode.NONE and not compilation.custom_ops:
            compilation.custom_ops = ["all"]

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        super().check_and_update_config(vllm_config)
        model = vllm_config.model_config
        graphs.capture_longer_steps(vllm_config, in_fp8=model is not None and quantised_weights.in_fp8(model))

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: "VllmConfig") -> "IrOpPriorityConfig":
        """The priority of IR op providers. With a compiler it is vLLM's code, which the compiler can see through."""
        from vllm.config import CompilationMode
        from vllm.config.kernel import IrOpPriorityConfig

        if vllm_config.compilation_config.mode == CompilationMode.NONE:
            return super().get_default_ir_op_priority(vllm_config)
        return IrOpPriorityConfig.with_default(["native"])

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        quantised_weights.verify(quant, cls.where)

    # Kernels and graphs

    @classmethod
    def import_kernels(cls) -> None:
        """Define the one operator of vLLM's compiled kernels that graph capture needs. There are none to import."""
        compat.define_weak_ref_tensor()

    @classmethod
    def opaque_attention_op(cls) -> bool:
        """True with a compiler, which must not trace attention. Otherwise attention is called directly."""
        from vllm.config import get_current_vllm_config

        return refusals.compiles(get_current_vllm_config())

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        return True

    @classmethod
    def begin_graph_pool(cls) -> None:
        """Start a new pool for another engine of this process: PyTorch 2.11 adds no graph to a pool of gone graphs."""
        cls._global_graph_pool = None

    @classmethod
    def get_pass_manager_cls(cls) -> str:
        return "vllm_opset.platform.cuda.passes.OpsetPassManager"

    @classmethod
    def get_punica_wrapper(cls) -> str:
        return "vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU"

    # Several GPUs

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator"

    @classmethod
    def use_custom_op_collectives(cls) -> bool:
        return True

    # The device

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """Accept every dtype that vLLM knows: GPUs without bfloat16 are refused as a whole."""

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        torch.cuda.set_device(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        torch.cuda.manual_seed_all(seed)

    @classmethod
    def device_control_id_to_physical_device_id(cls, device_id: str) -> int:
        return nvml.physical_id(device_id)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        known = nvml.gpu(device_id)
        return known.name if known else torch.cuda.get_device_name(device_id)

    @classmethod
    def get_device_uuid(cls, device_id: int = 0) -> str:
        return str(torch.cuda.get_device_properties(device_id).uuid)

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        known = nvml.gpu(device_id)
        return known.total_memory if known else torch.cuda.get_device_properties(device_id).total_memory

    @classmethod
    def get_current_memory_usage(cls, device: torch.types.Device | None = None) -> float:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.max_memory_allocated(device)

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return torch.cuda.get_device_properties(device_id).multi_processor_count

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """Accept several attention layers at one place in the model. vLLM asks for this since 0.28."""
