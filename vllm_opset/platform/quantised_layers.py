"""The patches that let vLLM build layers with quantised weights without its compiled kernels."""

from collections.abc import Callable, Mapping

from vllm_opset.platform.bridges import WITHOUT_KERNELS, find, has, patch, uses

REQUANTISE = "vllm.model_executor.layers.quantization.utils.w8a8_utils.requantize_with_max_scale"
LINEAR_KERNELS = "vllm.model_executor.kernels.linear"
# vLLM's lists of kernels for quantised linear layers, by the type of kernel that its registration names.
KERNEL_LISTS = {
    "fp8": "_POSSIBLE_FP8_KERNELS",
    "fp8_block": "_POSSIBLE_FP8_BLOCK_KERNELS",
    "int8": "_POSSIBLE_INT8_KERNELS",
    "mp": "_POSSIBLE_KERNELS",
}
OWN_MODULES = f"{__name__.partition('.')[0]}."
EXPERTS = "vllm.model_executor.layers.fused_moe"
QUANTISATION = "vllm.model_executor.layers.quantization"
OF_INT4_EXPERTS = f"{QUANTISATION}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16"


@patch(
    has(f"{LINEAR_KERNELS}._POSSIBLE_FP8_BLOCK_KERNELS"),
    ends="the oldest release that is served registers them, as 0.33 does by the kernel type fp8_block",
    changes=(f"{LINEAR_KERNELS}._POSSIBLE_FP8_BLOCK_KERNELS",),
    worker=WITHOUT_KERNELS,
)
def register_fp8_block_kernel(kernel: type) -> None:
    """Register a kernel for fp8 weights with scales by blocks. vLLM's own registration takes these from 0.33 on.

    Parameters: kernel is a subclass of vLLM's FP8ScaledMMLinearKernel.
    """
    from vllm.model_executor.kernels import linear
    from vllm.platforms.interface import PlatformEnum

    if uses(f"{LINEAR_KERNELS}.register_linear_kernel", "fp8_block")():
        linear.register_linear_kernel(kernel, PlatformEnum.OOT, "fp8_block")
    else:
        linear._POSSIBLE_FP8_BLOCK_KERNELS.setdefault(PlatformEnum.OOT, []).append(kernel)


@patch(
    has(f"{LINEAR_KERNELS}._POSSIBLE_KERNELS"),
    ends="vLLM's registration of a kernel says whether it is asked before the others",
    changes=tuple(f"{LINEAR_KERNELS}.{name}" for name in KERNEL_LISTS.values()),
    worker=("native",),
)
def ask_linear_kernels_first(kernels: Mapping[str, type]) -> None:
    """Have vLLM ask opset's kernels first for a quantised linear layer.

    vLLM takes the first kernel of a list that can serve a layer, and its registration adds to the end of the list.

    Parameters: kernels maps a type of kernel, such as "fp8", to a subclass of vLLM's class for it. The subclasses of an
    earlier call leave the lists. So an empty mapping restores the lists that vLLM made.
    """
    from vllm.model_executor.kernels import linear
    from vllm.platforms.interface import PlatformEnum

    for kind, name in KERNEL_LISTS.items():
        lists = getattr(linear, name)
        own = [one for one in lists[PlatformEnum.CUDA] if not one.__module__.startswith(OWN_MODULES)]
        lists[PlatformEnum.CUDA] = [kernels[kind], *own] if kind in kernels else own


@patch(
    uses(REQUANTISE, "scaled_fp8_quant"),
    ends="vLLM quantises the weights that it loads by PyTorch, where its kernels are absent",
    changes=("vllm._custom_ops.scaled_fp8_quant",),
    worker=WITHOUT_KERNELS,
)
def quantise_weights(quantise: Callable) -> None:
    """Replace the function by which vLLM quantises weights to fp8 while it loads them. It calls vLLM's own kernels.

    Parameters: quantise is called as vLLM's function is.
    """
    from vllm import _custom_ops

    _custom_ops.scaled_fp8_quant = quantise


@patch(
    has(f"{EXPERTS}.oracle.fp8.backend_to_kernel_cls"),
    ends="vLLM registers quantised experts out of its tree, as it does unquantised ones",
    changes=tuple(f"{EXPERTS}.oracle.{dtype}.backend_to_kernel_cls" for dtype in ("fp8", "int8")),
    worker=WITHOUT_KERNELS,
)
def register_quantised_experts(experts: type) -> None:
    """Register a class for experts with fp8 and int8 weights. vLLM chooses it from a list of its own backends.

    It is found where vLLM looks for its Triton kernels, for which the weights stay as they are loaded. None of the
    other backends is found: each needs compiled kernels or another platform.

    Parameters: experts is a subclass of vLLM's FusedMoEExpertsMonolithic.
    """
    from vllm.model_executor.layers.fused_moe.oracle import fp8, int8

    for oracle, backends in ((fp8, fp8.Fp8MoeBackend), (int8, int8.Int8MoeBackend)):
        oracle.backend_to_kernel_cls = lambda backend, own=backends.TRITON: [experts] if backend is own else []


@patch(
    uses(f"{QUANTISATION}.auto_gptq.AutoGPTQLinearMethod.__init__", "verify_marlin_supported"),
    ends="vLLM asks the kernels that are registered for a platform whether they serve a GPTQ layer",
    changes=(f"{QUANTISATION}.auto_gptq.verify_marlin_supported",),
    worker=WITHOUT_KERNELS,
)
def serve_gptq_without_marlin() -> None:
    """Let vLLM build GPTQ layers on a device that has no Marlin kernel.

    vLLM first asks whether Marlin serves the device, and raises for a CPU. It then chooses among the kernels that are
    registered for the platform, which answer for themselves.
    """
    from vllm.model_executor.layers.quantization import auto_gptq

    auto_gptq.verify_marlin_supported = _any_device


def _any_device(**layer: object) -> None:
    pass


@patch(
    uses(f"{QUANTISATION}.auto_awq.AutoAWQConfig.get_quant_method", "AutoAWQLinearMethod"),
    ends="vLLM chooses kernels for AWQ layers by registration on out-of-tree platforms too",
    changes=(f"{QUANTISATION}.auto_awq.AutoAWQLinearMethod",),
    worker=WITHOUT_KERNELS,
)
def serve_awq(method: type) -> None:
    """Replace the method that vLLM gives AWQ layers on a platform that is none of its own.

    It calls vLLM's kernels. On its own platforms, vLLM chooses among registered kernels.

    Parameters: method is a subclass of the replaced class.
    """
    from vllm.model_executor.layers.quantization import auto_awq

    auto_awq.AutoAWQLinearMethod = method


@patch(
    has(f"{OF_INT4_EXPERTS}.CompressedTensorsWNA16MoEMethod"),
    ends="vLLM registers quantised experts out of its tree, as it does unquantised ones",
    changes=(
        f"{OF_INT4_EXPERTS}.CompressedTensorsWNA16MoEMethod",
        *(
            f"{QUANTISATION}.auto_{method.lower()}.{name}"
            for method in ("AWQ", "GPTQ")
            for name in (f"Auto{method}MoEMethod", "check_moe_marlin_supports_layer")
        ),
    ),
    worker=WITHOUT_KERNELS,
)
def serve_int4_experts(compressed_tensors: type, awq: type, gptq: type) -> None:
    """Replace the methods that vLLM gives experts with int4 weights. They choose among backends of vLLM's own.

    For AWQ and GPTQ, vLLM first asks whether Marlin serves the layer, and gives it another method if not.

    Parameters: each is called as vLLM's class of the format is.
    """
    from vllm.model_executor.layers.quantization import auto_awq, auto_gptq

    find(OF_INT4_EXPERTS).CompressedTensorsWNA16MoEMethod = compressed_tensors
    auto_awq.AutoAWQMoEMethod, auto_gptq.AutoGPTQMoEMethod = awq, gptq
    auto_awq.check_moe_marlin_supports_layer = auto_gptq.check_moe_marlin_supports_layer = _any_layer


def _any_layer(*layer: object, **how: object) -> bool:
    return True


@patch(
    has(f"{OF_INT4_EXPERTS}_marlin.CompressedTensorsWNA16MarlinMoEMethod"),
    last=(0, 26),
    changes=(f"{OF_INT4_EXPERTS}_marlin.CompressedTensorsWNA16MarlinMoEMethod",),
    worker=WITHOUT_KERNELS,
)
def serve_int4_experts_without_marlin(compressed_tensors: type) -> None:
    """Replace the method that vLLM gives experts with int4 weights of compressed-tensors whose sizes fit Marlin.

    Parameters: it is called as vLLM's class is.
    """
    find(f"{OF_INT4_EXPERTS}_marlin").CompressedTensorsWNA16MarlinMoEMethod = compressed_tensors


@patch(
    has(f"{EXPERTS}.routed_experts.RoutedExperts._get_quant_method"),
    ends="vLLM registers quantised experts out of its tree, as it does unquantised ones",
    changes=(f"{EXPERTS}.routed_experts.RoutedExperts._get_quant_method",),
    worker=("native",),
)
def replace_expert_methods(choose: Callable) -> None:
    """Replace the function by which a layer of experts gets its method while a model is built.

    vLLM's methods for int4 and MXFP4 weights store them for their own kernels once they are loaded.

    Parameters: choose is called as vLLM's function is. vLLM's own function takes the change back.
    """
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    RoutedExperts._get_quant_method = choose
