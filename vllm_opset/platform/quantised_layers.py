"""The patches that let vLLM build layers with quantised weights without its compiled kernels."""

import functools
from collections.abc import Callable, Mapping

import torch

from vllm_opset.model.loading import check_blocks, prefix_of
from vllm_opset.platform.bridges import WITHOUT_KERNELS, find, has, patch, uses, wrap_once

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
OF_COMPRESSED_TENSORS = f"{QUANTISATION}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8"
OF_INT4_EXPERTS = f"{QUANTISATION}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16"
EXPERTS_METHODS = (
    f"{QUANTISATION}.fp8.Fp8MoEMethod",
    f"{OF_COMPRESSED_TENSORS}_fp8.CompressedTensorsW8A8Fp8MoEMethod",
    f"{OF_COMPRESSED_TENSORS}_int8.CompressedTensorsW8A8Int8MoEMethod",
)
STEPS_OF_LOADING = ("create_weights", "process_weights_after_loading")
LINEAR_METHODS = (
    f"{QUANTISATION}.fp8.Fp8LinearMethod",
    f"{QUANTISATION}.compressed_tensors.compressed_tensors.CompressedTensorsLinearMethod",
    f"{QUANTISATION}.auto_gptq.AutoGPTQLinearMethod",
)


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

    Parameters: kernels has a subclass of vLLM's kernels by the type of kernel, such as "fp8". The former ones are taken
    out of the lists, so none leaves the lists as vLLM made them.
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
    lambda: all(uses(f"{method}.create_weights", "ones")() for method in EXPERTS_METHODS),
    ends="vLLM raises for scales that a checkpoint lacks",
    changes=tuple(f"{method}.create_weights" for method in EXPERTS_METHODS),
    worker=WITHOUT_KERNELS,
)
def mark_missing_scales() -> None:
    """Fill the scales of experts with NaN before weights are loaded, so that one which the checkpoint lacks is noticed.

    vLLM fills them with 1. It does not notice a missing one either: it loads the scales of all experts as one weight.
    """
    for method in map(find, EXPERTS_METHODS):
        wrap_once(method, "create_weights", _with_marked_scales)


def _with_marked_scales(create: Callable[..., None]) -> Callable[..., None]:
    def create_weights(self, layer: torch.nn.Module, *args, **kwargs) -> None:
        create(self, layer, *args, **kwargs)
        for parameter in _scales_of(layer).values():
            parameter.data.fill_(torch.nan)

    return create_weights


def _scales_of(layer: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in layer.named_parameters(recurse=False) if "scale" in name}


@patch(
    lambda: all(has(f"{method}.{name}")() for method in LINEAR_METHODS for name in STEPS_OF_LOADING),
    ends="vLLM raises for scales that a checkpoint lacks, and names those that do not fit",
    changes=tuple(f"{method}.{name}" for method in LINEAR_METHODS for name in STEPS_OF_LOADING),
    worker=WITHOUT_KERNELS,
)
def check_scales_of_linear_layers(awq: type) -> None:
    """Raise an error with a name for a scale of a linear layer that is missing, or whose shape does not fit.

    vLLM does not notice a missing scale. It uses what was in memory, or the scale of another part of a fused layer. The
    engine then answers with wrong tokens. For a shape that does not fit, vLLM raises an error without a name.

    A part of a fused layer that ends inside a block of fp8 weights is refused before weights are loaded. vLLM loads the
    scales of the parts after it as those of other rows.

    Parameters: awq is opset's subclass of vLLM's method for AWQ, whose scales are checked alike.
    """
    for method in (awq, *map(find, LINEAR_METHODS)):
        wrap_once(method, "create_weights", _with_named_scales)
        wrap_once(method, "process_weights_after_loading", _with_checked_scales)


def _with_named_scales(create: Callable[..., None]) -> Callable[..., None]:
    marked = _with_marked_scales(create)

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        *args,
        **kwargs,
    ) -> None:
        block = getattr(getattr(layer, "scheme", self), "weight_block_size", None)
        if block is not None:
            check_blocks(layer, block, output_partition_sizes, output_size)
        sizes = input_size_per_partition, output_partition_sizes, input_size, output_size
        marked(self, layer, *sizes, *args, **kwargs)
        for name, parameter in _scales_of(layer).items():
            parameter.weight_loader = _named(parameter.weight_loader, f"{prefix_of(layer)}.{name}")

    return create_weights


def _named(load: Callable[..., None], name: str) -> Callable[..., None]:
    """A parameter's loader whose errors have the name of the parameter."""

    @functools.wraps(load)
    def named(parameter: torch.nn.Parameter, loaded: torch.Tensor, *args, **kwargs) -> None:
        try:
            load(parameter, loaded, *args, **kwargs)
        except (AssertionError, RuntimeError) as error:
            raise ValueError(
                f"{name} has another granularity than config.json says: {list(loaded.shape)} in the checkpoint, "
                f"for {list(parameter.shape)} here"
            ) from error

    return named


def _with_checked_scales(process: Callable[..., None]) -> Callable[..., None]:
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        for name, parameter in _scales_of(layer).items():
            if parameter.isnan().any():
                raise ValueError(f"{prefix_of(layer)}.{name} holds NaN: the checkpoint is damaged, or lacks it")
        process(self, layer)

    return process_weights_after_loading


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
