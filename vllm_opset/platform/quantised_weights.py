"""Quantised weights without vLLM's kernels: which are served, by its registrations, and why the others are refused."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_opset.platform import expert_loading, int4_weights, quantised_layers, quantised_loading
from vllm_opset.platform.refusals import Refusal, Rule, of_model

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

GPT_OSS = "gpt_oss_mxfp4"  # vLLM's name for the method mxfp4 in a checkpoint of gpt-oss
METHODS = ("fp8", "compressed-tensors", GPT_OSS, *int4_weights.AWQ, *int4_weights.GPTQ)
# The types of 8 bits in compressed-tensors, and the groups of weights that share a scale.
STRATEGIES = {"float": ("tensor", "channel", "block"), "int": ("tensor", "channel")}
TENSORS = ("weights", "input_activations", "output_activations")  # of a group of compressed-tensors
# For experts, vLLM loads these pairs of strategies alone: of the weights, and of the activations.
OF_EXPERTS = {
    "float": (("tensor", "tensor"), ("channel", "token"), ("block", "group")),
    "int": (("channel", "token"),),
}
# The least rows and columns of a block of fp8 weights: kernels take scales for so many columns, and vLLM quantises as
# many columns of activations together as a block has rows.
LEAST_BLOCK = 32
CURE = (
    "choose a checkpoint in float32, bfloat16 or float16, alone or with --quantization fp8, or one whose linear layers "
    "and experts are in fp8 e4m3 with scales per tensor, per channel or by blocks whose sizes are powers of two from "
    f"{LEAST_BLOCK} on, in symmetric int8 with scales per channel (linear layers also per tensor), or in int4 by "
    "groups (AWQ, symmetric GPTQ, or compressed-tensors, without act-order by groups), or gpt-oss with experts in "
    "MXFP4; experts in int8 need activations per token, and those in fp8 of compressed-tensors need them per tensor, "
    "per token or per group, as weights are per tensor, per channel or by blocks"
)


@dataclass(frozen=True)
class QuantisedWeights(Rule):
    """Refuses the quantised weights that no kernel serves. The message names what the checkpoint has.

    named: gives the names of what is refused of a model's quantised weights.
    """

    named: Callable[["ModelConfig"], Iterator[str]]

    def refusal(self, where: str, config: "VllmConfig | None" = None) -> Refusal:
        return self.of(next(self.named(config.model_config)), where)

    def of(self, found: str, where: str) -> Refusal:
        return Refusal(f"vllm-opset {where} does not support quantised weights with {found}: {self.cure}.")


def _checkpoint(model: "ModelConfig") -> Mapping:
    """How a model's config.json says that its weights are stored; empty if it says nothing.

    vLLM finds it in several places.
    """
    return model.model_arch_config.quantization_config or {}


def stored_weights(model: "ModelConfig") -> dict[str, Mapping]:
    """How compressed-tensors stores a model's weights, by the names of its groups. Empty for other methods."""
    return {name: group["weights"] or {} for name, group in _groups(_checkpoint(model)).items()}


def _groups(checkpoint: Mapping) -> dict[str, dict]:
    """The groups of compressed-tensors that vLLM reads, by their names, with all settings of the tensors in them.

    checkpoint: the quantization_config of the model's config.json. vLLM leaves groups of attention out. They belong to
    the quantisation of the KV cache, which has a setting of its own.
    """
    from compressed_tensors.quantization import QuantizationArgs

    def complete(group: Mapping) -> dict:
        tensors = {name: group.get(name) for name in TENSORS}
        read = {name: QuantizationArgs.model_validate(given) for name, given in tensors.items() if given}
        return {**group, **tensors} | {name: settings.model_dump(mode="json") for name, settings in read.items()}

    groups = checkpoint.get("config_groups", {}).items()
    return {name: complete(group) for name, group in groups if not _is_of_attention(group.get("targets") or ())}


def _is_of_attention(targets: Sequence[str]) -> bool:
    """Whether a group is of attention layers alone. targets: the names that the group gives of its layers."""
    return len(targets) == 1 and targets[0].endswith("Attention")


def in_fp8(model: "ModelConfig") -> bool:
    """Whether a model's quantised weights are all in fp8, by the method fp8 or by compressed-tensors."""
    if model.quantization != "compressed-tensors":
        return str(model.quantization).startswith("fp8")
    kinds = {(weights.get("type"), weights.get("num_bits")) for weights in stored_weights(model).values()}
    return kinds == {("float", 8)}


def unserved(model: "ModelConfig") -> Iterator[str]:
    """Names each feature of a model's quantised weights that is not served. The weights need not be loaded."""
    if model.quantization is None:
        return
    if model.quantization not in METHODS:
        yield f"the method {model.quantization}"
    if getattr(model, "quantization_config", None) is not None:
        yield "--quantization-config"
    checkpoint = _checkpoint(model)
    if checkpoint.get("store_dtype"):
        yield f"experts in {checkpoint['store_dtype']}"
    yield from _unserved_blocks(checkpoint.get("weight_block_size"))
    if model.quantization == "compressed-tensors":
        yield from _unserved_by_compressed_tensors(checkpoint, model.is_moe)
    elif model.quantization in int4_weights.AWQ:
        yield from int4_weights.unserved_by_awq(checkpoint)
    elif model.quantization in int4_weights.GPTQ:
        yield from int4_weights.unserved_by_gptq(checkpoint)


def _unserved_by_compressed_tensors(checkpoint: Mapping, has_experts: bool) -> Iterator[str]:
    """checkpoint: the quantization_config of the model's config.json."""
    for key in ("kv_cache_scheme", "transform_config"):
        if checkpoint.get(key):
            yield f"a {key}"
    sparsity = checkpoint.get("sparsity_config") or {}
    if sparsity.get("targets") or sparsity.get("format", "dense") != "dense":
        yield "a sparsity_config"
    for name, group in _groups(checkpoint).items():
        weights, activations = group["weights"], group["input_activations"]
        kind = weights and weights["type"]
        if not weights:
            yield f"quantised activations alone ({name} of compressed-tensors)"
        elif int4_weights.is_int4(weights):
            yield from int4_weights.unserved_by_compressed_tensors(group, checkpoint.get("format", ""))
        elif not _is_stored(weights, kind) or weights["strategy"] not in STRATEGIES.get(kind, ()):
            yield f"{_described(weights)} weights ({name} of compressed-tensors)"
        elif any(blocks := [*_unserved_blocks(weights["block_structure"])]):
            yield from blocks
        elif activations is None or not _is_stored(activations, kind):
            of_x = "unquantised" if activations is None else _described(activations)
            yield f"{_described(weights)} weights for {of_x} activations ({name} of compressed-tensors)"
        elif has_experts and (weights["strategy"], activations["strategy"]) not in OF_EXPERTS[kind]:
            yield (
                f"experts of {_described(weights)} weights for {_described(activations)} activations "
                f"({name} of compressed-tensors)"
            )


def _unserved_blocks(sizes: Sequence[int] | None) -> Iterator[str]:
    """sizes: the rows and columns of weights that share a scale; None for other granularities."""
    if sizes and any(size < LEAST_BLOCK or size.bit_count() != 1 for size in sizes):
        yield f"fp8 blocks of {' x '.join(map(str, sizes))}"


def _is_stored(tensor: Mapping, kind: str | None) -> bool:
    """Whether a tensor is stored in 8 bits of this type, without a zero point."""
    return tensor["type"] == kind and tensor["num_bits"] == 8 and tensor["symmetric"]


def _described(tensor: Mapping) -> str:
    symmetry = "" if tensor["symmetric"] else "asymmetric "
    return f"{symmetry}{tensor['num_bits']}-bit {tensor['type']} {tensor['strategy']}"


def rule(feature: str, cure: str, named: Callable[["ModelConfig"], Iterator[str]]) -> QuantisedWeights:
    """A rule that refuses a model if `named` gives a name of what is not served. The message has the first name."""
    return QuantisedWeights(feature, cure, of_model(lambda model: any(named(model))), named)


def _quantises_gpt_oss(model: "ModelConfig") -> bool:
    """Whether vLLM is to quantise gpt-oss, or a model that is loaded as it is, while it loads unquantised weights."""
    return expert_loading.is_loaded_as_gpt_oss(model) and model.quantization == "fp8" and not _checkpoint(model)


FP8_OF_GPT_OSS = Rule(
    "--quantization fp8 for gpt-oss, whose experts vLLM does not pass to the loaders that quantise",
    "leave out --quantization, or choose a checkpoint with experts in MXFP4",
    of_model(_quantises_gpt_oss),
)
QUANTISED_WEIGHTS = rule("quantised weights in other formats", CURE, unserved)


def check(rules: Iterable[Rule], model: "ModelConfig", where: str) -> None:
    """Raise Refusal for quantised weights that one of these rules refuses."""
    for one in rules:
        if isinstance(one, QuantisedWeights) and (found := next(one.named(model), None)):
            raise one.of(found, where)


def verify(method: str, where: str) -> None:
    """Raise Refusal for a method of quantisation of which no format is served.

    vLLM calls it before it makes the configuration of the method, which for gpt-oss is opset's own.
    """
    if method not in METHODS:
        raise QUANTISED_WEIGHTS.of(f"the method {method}", where)
    if method == GPT_OSS:
        configure_mxfp4()


def register(model: "ModelConfig") -> None:
    """Let vLLM give its layers with quantised weights opset's kernels, before a model with such weights is built."""
    if model.quantization in (None, GPT_OSS):  # the configuration of gpt-oss has its own experts
        return
    _register_linear()
    if model.is_moe:
        _register_experts()


@functools.cache  # vLLM keeps what is registered for the life of the process
def _register_linear() -> None:
    from vllm.model_executor.kernels.linear import register_linear_kernel
    from vllm.platforms.interface import PlatformEnum

    from vllm_opset.model.fp8_linear import OpsetFp8LinearKernel, scaled_fp8_quant
    from vllm_opset.model.int4_linear import OpsetAwqLinearMethod, OpsetInt4LinearKernel
    from vllm_opset.model.int8_linear import OpsetInt8LinearKernel

    register_linear_kernel(OpsetFp8LinearKernel, PlatformEnum.OOT, "fp8")
    register_linear_kernel(OpsetInt8LinearKernel, PlatformEnum.OOT, "int8")
    register_linear_kernel(OpsetInt4LinearKernel, PlatformEnum.OOT)
    quantised_loading.check_weights_of_linear_layers(OpsetAwqLinearMethod)
    quantised_loading.check_weights_that_vllm_quantises()
    quantised_loading.keep_int8_scales_of_parts()
    quantised_loading.refuse_embeddings_without_triton()
    quantised_layers.serve_gptq_without_marlin()
    quantised_layers.serve_awq(OpsetAwqLinearMethod)
    quantised_layers.register_fp8_block_kernel(OpsetFp8LinearKernel)
    quantised_layers.quantise_weights(scaled_fp8_quant)


@contextmanager
def linear_kernels_first() -> Iterator[None]:
    """Within this context, stock vLLM asks opset's kernels for quantised linear layers before its own."""
    from vllm_opset.model.fp8_linear import OpsetFp8LinearKernel
    from vllm_opset.model.int4_linear import OpsetInt4LinearKernel
    from vllm_opset.model.int8_linear import OpsetInt8LinearKernel

    fp8 = {"fp8": OpsetFp8LinearKernel, "fp8_block": OpsetFp8LinearKernel}
    quantised_layers.ask_linear_kernels_first(fp8 | {"int8": OpsetInt8LinearKernel, "mp": OpsetInt4LinearKernel})
    try:
        yield
    finally:
        quantised_layers.ask_linear_kernels_first({})


@contextmanager
def replaced_expert_methods(config: "VllmConfig") -> Iterator[None]:
    """Within this context, stock vLLM builds a model's experts with int4 and MXFP4 weights by opset's methods.

    vLLM's own methods build the model if opset does not serve all of its weights, and also if there is a draft model:
    both models are built in this context, and `bound_experts` binds only one of them.
    """
    if any(unserved(config.model_config)) or config.speculative_config is not None:
        yield
        return
    # Imported late: vLLM's module of experts imports thousands of others.
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    from vllm_opset.model.replaced_methods import replaced

    of_vllm = RoutedExperts._get_quant_method
    quantised_layers.replace_expert_methods(lambda layer, *args: replaced(layer, of_vllm(layer, *args)))
    try:
        yield
    finally:
        quantised_layers.replace_expert_methods(of_vllm)


@functools.cache
def _register_experts() -> None:
    # Imported late: vLLM's module of experts imports thousands of others.
    from vllm_opset.model import int4_experts
    from vllm_opset.model.quantised_experts import OpsetQuantisedExperts

    quantised_layers.register_quantised_experts(OpsetQuantisedExperts)
    quantised_loading.check_weights_of_experts()
    quantised_layers.serve_int4_experts(
        int4_experts.OpsetCompressedExpertsMethod,
        int4_experts.OpsetAwqExpertsMethod,
        int4_experts.OpsetGptqExpertsMethod,
    )
    quantised_layers.serve_int4_experts_without_marlin(int4_experts.OpsetCompressedExpertsMethod)


@functools.cache
def configure_mxfp4() -> None:
    """Have vLLM configure gpt-oss's MXFP4 weights by opset's class."""
    from vllm.model_executor.layers.quantization import register_quantization_config

    # Imported late: vLLM's module of experts imports thousands of others.
    from vllm_opset.model.mxfp4_experts import OpsetMxfp4Config

    register_quantization_config(GPT_OSS)(OpsetMxfp4Config)
