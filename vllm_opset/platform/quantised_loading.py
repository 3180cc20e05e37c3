"""The patches by which quantised weights are checked and loaded whole: errors name what is missing or not served."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from vllm_opset.model.loading import (
    AWQ_VALUES,
    check_blocks,
    check_blocks_of_experts,
    check_experts,
    check_groups,
    check_linear,
    refusal,
    watch,
)
from vllm_opset.platform.bridges import WITHOUT_KERNELS, find, has, patch, wrap_once
from vllm_opset.platform.quantised_layers import QUANTISATION

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig

COMPRESSED_TENSORS = f"{QUANTISATION}.compressed_tensors"
OF_EXPERTS = f"{COMPRESSED_TENSORS}.compressed_tensors_moe.compressed_tensors_moe_w8a8"
EXPERTS_METHODS = (
    f"{QUANTISATION}.fp8.Fp8MoEMethod",
    f"{OF_EXPERTS}_fp8.CompressedTensorsW8A8Fp8MoEMethod",
    f"{OF_EXPERTS}_int8.CompressedTensorsW8A8Int8MoEMethod",
)
STEPS_OF_LOADING = ("create_weights", "process_weights_after_loading")
LINEAR_METHODS = (
    f"{QUANTISATION}.fp8.Fp8LinearMethod",
    f"{COMPRESSED_TENSORS}.compressed_tensors.CompressedTensorsLinearMethod",
    f"{QUANTISATION}.auto_gptq.AutoGPTQLinearMethod",
)
# What quantises the weights of a checkpoint in 16 or 32 bits while vLLM loads them, and where it sets that up.
ONLINE = f"{QUANTISATION}.online"
ONLINE_LINEAR = f"{ONLINE}.fp8.Fp8PerTensorOnlineLinearMethod"
ONLINE_EXPERTS = f"{ONLINE}.fp8.Fp8PerTensorOnlineMoEMethod"
BEGIN_ONLINE = tuple(f"{ONLINE}.{module}.initialize_online_processing" for module in ("fp8", "moe_base"))
IS_QUANTISED = "_already_called_process_weights_after_loading"  # vLLM's attribute of a layer
INT8_LINEAR = f"{COMPRESSED_TENSORS}.schemes.compressed_tensors_w8a8_int8.CompressedTensorsW8A8Int8"
EMBEDDING = f"{COMPRESSED_TENSORS}.compressed_tensors_embedding.CompressedTensorsEmbeddingWNA16Int"
CHOICE = f"{COMPRESSED_TENSORS}.compressed_tensors.CompressedTensorsConfig"


@patch(
    has("vllm.config.vllm.VllmConfig._get_quantization_config"),
    ends="vLLM gives its platform a checkpoint's quantization_config before it reads it itself",
    changes=("vllm.config.vllm.VllmConfig._get_quantization_config",),
    loading=WITHOUT_KERNELS,
)
def ask_before_quantisation_is_configured(ask: Callable[["ModelConfig"], None]) -> None:
    """Have vLLM call `ask` with the configuration of a model before it makes that of the model's quantised weights.

    vLLM raises then for formats that it does not load, such as GPTQ with zero points. Its errors do not say which
    checkpoints would serve.
    """
    from vllm.config import VllmConfig

    def around(configure: Callable) -> Callable:
        def asked(model_config: "ModelConfig", load_config: "LoadConfig"):
            ask(model_config)
            return configure(model_config, load_config)

        return asked

    wrap_once(VllmConfig, "_get_quantization_config", around)


@patch(
    lambda: all(has(f"{method}.{name}")() for method in EXPERTS_METHODS for name in STEPS_OF_LOADING),
    ends="vLLM raises for weights that a checkpoint lacks",
    changes=tuple(f"{method}.{name}" for method in EXPERTS_METHODS for name in STEPS_OF_LOADING),
    worker=WITHOUT_KERNELS,
)
def check_weights_of_experts() -> None:
    """Raise an error with a name for a tensor of fp8 or int8 experts that is missing.

    vLLM does not notice it, because a parameter holds the weights of all experts. The engine then answers with wrong
    tokens.

    Experts whose blocks of fp8 weights vLLM cannot load are refused before weights are loaded. vLLM raises for them
    without a cure, or blames the checkpoint while it is loaded.
    """
    for method in map(find, EXPERTS_METHODS):
        wrap_once(method, "create_weights", _watching_blocks_of_experts)
        wrap_once(method, "process_weights_after_loading", _after(check_experts))


def _watching(create: Callable[..., None]) -> Callable[..., None]:
    """Has `create_weights` watch what is loaded into the layer."""

    def create_weights(self, layer: torch.nn.Module, *args, **kwargs) -> None:
        create(self, layer, *args, **kwargs)
        watch(layer)

    return create_weights


def _watching_blocks_of_experts(create: Callable[..., None]) -> Callable[..., None]:
    watching = _watching(create)

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        *args,
        **kwargs,
    ) -> None:
        block = getattr(self, "weight_block_size", None)
        if block is not None:
            is_split = getattr(self, "weight_scale_refine", None) is not None
            check_blocks_of_experts(
                layer, block, is_split, intermediate_size_per_partition, hidden_size, self.moe.tp_size
            )
        sizes = num_experts, hidden_size, intermediate_size_per_partition
        watching(self, layer, *sizes, *args, **kwargs)

    return create_weights


def _after(check: Callable[[torch.nn.Module], None]) -> Callable[[Callable], Callable]:
    """Has `process_weights_after_loading` check the layer first."""

    def around(process: Callable[..., None]) -> Callable[..., None]:
        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            check(layer)
            process(self, layer)

        return process_weights_after_loading

    return around


@patch(
    lambda: all(has(f"{method}.{name}")() for method in LINEAR_METHODS for name in STEPS_OF_LOADING),
    ends="vLLM raises for weights that a checkpoint lacks, and names those that do not fit",
    changes=tuple(f"{method}.{name}" for method in LINEAR_METHODS for name in STEPS_OF_LOADING),
    worker=WITHOUT_KERNELS,
)
def check_weights_of_linear_layers(awq: type) -> None:
    """Raise an error with a name for a tensor of a linear layer that is missing, or whose shape does not fit.

    vLLM does not notice a missing one. It uses what was in memory, or the scale of another part of a fused layer. The
    engine then answers with wrong tokens. For a shape that does not fit, vLLM raises an error without a name.

    A part of a fused layer that ends inside a block of fp8 weights is refused before weights are loaded. vLLM loads the
    scales of the parts after it as those of other rows. Rows of int4 weights that end inside a group are refused, too.
    vLLM finds no kernel for them, and does not name the layer.

    vLLM 0.26 to 0.29 create k and v also for the layers of Gemma 3n and Gemma 4 that share the KV cache of another
    layer. Checkpoints that Transformers has saved lack these tensors, so with quantised weights they are an error. vLLM
    0.30 and later create q alone there.

    Parameters: awq is opset's subclass of vLLM's method for AWQ, whose weights are checked alike.
    """
    wrap_once(awq, "create_weights", _watching_sizes)
    wrap_once(awq, "process_weights_after_loading", _after(functools.partial(check_linear, names=AWQ_VALUES)))
    for method in map(find, LINEAR_METHODS):
        wrap_once(method, "create_weights", _watching_sizes)
        wrap_once(method, "process_weights_after_loading", _after(check_linear))


def _watching_sizes(create: Callable[..., None]) -> Callable[..., None]:
    watching = _watching(create)

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
        # compressed-tensors keeps the size of int4 groups in a layer's scheme, AWQ and GPTQ in their configuration.
        group_size = getattr(getattr(layer, "scheme", None) or self.quant_config, "group_size", None)
        if group_size is not None:
            check_groups(layer, group_size, input_size_per_partition, input_size)
        sizes = input_size_per_partition, output_partition_sizes, input_size, output_size
        watching(self, layer, *sizes, *args, **kwargs)

    return create_weights


@patch(
    lambda: all(has(name)() for name in (ONLINE_LINEAR, ONLINE_EXPERTS, *BEGIN_ONLINE)),
    ends="vLLM raises for weights that a checkpoint lacks",
    changes=(
        *BEGIN_ONLINE,
        *(f"{method}.process_weights_after_loading" for method in (ONLINE_LINEAR, ONLINE_EXPERTS)),
    ),
    worker=WITHOUT_KERNELS,
)
def check_weights_that_vllm_quantises() -> None:
    """Raise an error with a name for a weight that `--quantization fp8` would quantise and that is missing.

    vLLM would quantise what was in memory, which may also decide the one scale of a fused layer. The engine then
    answers with wrong tokens.
    """
    for name in BEGIN_ONLINE:
        wrap_once(find(name.rpartition(".")[0]), "initialize_online_processing", _watching_before)
    for method, check in ((ONLINE_LINEAR, check_linear), (ONLINE_EXPERTS, check_experts)):
        wrap_once(find(method), "process_weights_after_loading", _before_quantising(check))


def _watching_before(begin: Callable[[torch.nn.Module], None]) -> Callable[[torch.nn.Module], None]:
    """Has a layer watched before vLLM wraps its loaders, because vLLM takes its wrappers off before the check."""
    from vllm.config import get_current_vllm_config

    def initialize_online_processing(layer: torch.nn.Module) -> None:
        if get_current_vllm_config().load_config.load_format != "dummy":  # which calls no loader
            watch(layer)
        begin(layer)

    return initialize_online_processing


def _before_quantising(check: Callable[..., None]) -> Callable[[Callable], Callable]:
    """Has `process_weights_after_loading` check the layer first. vLLM calls it again for a layer that is quantised."""

    def around(process: Callable[..., None]) -> Callable[..., None]:
        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            if not getattr(layer, IS_QUANTISED, False):
                check(layer, is_read=True)
            process(self, layer)

        return process_weights_after_loading

    return around


@patch(
    has(f"{INT8_LINEAR}.create_weights"),
    ends="vLLM keeps a scale of int8 activations for each part of a fused layer, as it does in fp8",
    changes=(f"{INT8_LINEAR}.create_weights",),
    worker=WITHOUT_KERNELS,
)
def keep_int8_scales_of_parts() -> None:
    """Keep the scale of int8 activations that a checkpoint gives for each part of a fused layer, as vLLM does in fp8.

    vLLM keeps one for all, which each part overwrites. When it loads weights again, it counts that one once for each
    part. It then takes the layer for complete before the last tensor has come, and leaves that out.
    """
    wrap_once(find(INT8_LINEAR), "create_weights", _with_scales_of_parts)


def _with_scales_of_parts(create: Callable[..., None]) -> Callable[..., None]:
    from vllm.model_executor.parameter import PerTensorScaleParameter

    def create_weights(self, layer: torch.nn.Module, *args, **kwargs) -> None:
        create(self, layer, *args, **kwargs)
        if self.is_static_input_scheme:
            of_parts = layer.input_scale.data.new_empty(len(layer.logical_widths))
            layer.input_scale = PerTensorScaleParameter(data=of_parts, weight_loader=layer.input_scale.weight_loader)

    return create_weights


@patch(
    has(EMBEDDING),
    ends="vLLM looks rows of quantised embeddings up without Triton",
    changes=(f"{CHOICE}.get_quant_method",),
    worker=WITHOUT_KERNELS,
)
def refuse_embeddings_without_triton() -> None:
    """Refuse quantised embeddings of compressed-tensors where there is no Triton, before their weights are loaded.

    vLLM has one kernel that looks up their rows, in Triton. It would fail at the first step.
    """
    wrap_once(find(CHOICE), "get_quant_method", _refusing_embeddings)


def _refusing_embeddings(choose: Callable) -> Callable:
    from vllm.triton_utils import HAS_TRITON

    def get_quant_method(self, layer: torch.nn.Module, prefix: str):
        method = choose(self, layer, prefix)
        if isinstance(method, find(EMBEDDING)) and not HAS_TRITON:
            raise refusal(
                f"quantised embeddings without Triton, as {prefix} has them",
                "choose a checkpoint whose embeddings are not quantised",
            )
        return method

    return get_quant_method
