"""Quantised weights without vLLM's kernels: which are served, by its registrations, and why the others are refused."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_opset.platform import compat
from vllm_opset.platform.refusals import Refusal, Rule, of_model

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

METHODS = ("fp8", "compressed-tensors")
STRATEGIES = ("tensor", "channel", "block")
CURE = (
    "choose a checkpoint in float32, bfloat16 or float16, alone or with --quantization fp8, or one whose linear layers "
    "are in fp8 e4m3 with scales per tensor, per channel or by blocks"
)


@dataclass(frozen=True)
class QuantisedWeights(Rule):
    """Refuses the quantised weights that no kernel serves. The message names what the checkpoint has."""

    def refusal(self, where: str, config: "VllmConfig | None" = None) -> Refusal:
        return self.of(next(unserved(config.model_config)), where)

    def of(self, found: str, where: str) -> Refusal:
        return Refusal(f"vllm-opset {where} does not support quantised weights with {found}: {self.cure}.")


def unserved(model: "ModelConfig") -> Iterator[str]:
    """Names each feature of a model's quantised weights that is not served. The weights need not be loaded."""
    if model.quantization is None:
        return
    if model.quantization not in METHODS:
        yield f"the method {model.quantization}"
    if model.is_moe:
        yield f"{model.quantization} experts"
    if getattr(model, "quantization_config", None) is not None:
        yield "--quantization-config"
    checkpoint = getattr(model.hf_config, "quantization_config", None) or {}
    if model.quantization == "compressed-tensors":
        yield from _unserved_by_compressed_tensors(checkpoint)


def _unserved_by_compressed_tensors(checkpoint: Mapping) -> Iterator[str]:
    """checkpoint: the quantization_config of the model's config.json."""
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if checkpoint.get(key):
            yield f"a {key}"
    for name, group in checkpoint.get("config_groups", {}).items():
        weights, activations = group.get("weights") or {}, group.get("input_activations")
        if not _is_fp8(weights) or weights.get("strategy") not in STRATEGIES:
            yield f"{_described(weights)} weights ({name} of compressed-tensors)"
        if activations is None or not _is_fp8(activations):
            kind = "unquantised" if activations is None else _described(activations)
            yield f"fp8 weights for {kind} activations ({name} of compressed-tensors)"


def _is_fp8(tensor: Mapping) -> bool:
    return tensor.get("type") == "float" and tensor.get("num_bits") == 8


def _described(tensor: Mapping) -> str:
    return f"{tensor.get('num_bits')}-bit {tensor.get('type')} {tensor.get('strategy')}"


QUANTISED_WEIGHTS = QuantisedWeights(
    "quantised weights other than fp8", CURE, of_model(lambda model: any(unserved(model)))
)


def verify(method: str, where: str) -> None:
    """Raise Refusal for a method of quantisation of which no format is served."""
    if method not in METHODS:
        raise QUANTISED_WEIGHTS.of(f"the method {method}", where)


@functools.cache  # vLLM keeps what is registered for the life of the process
def register() -> None:
    """Let vLLM give its fp8 layers opset's kernel, before a model with quantised weights is built."""
    from vllm.model_executor.kernels.linear import register_linear_kernel
    from vllm.platforms.interface import PlatformEnum

    from vllm_opset.model.fp8_linear import OpsetFp8LinearKernel, scaled_fp8_quant

    register_linear_kernel(OpsetFp8LinearKernel, PlatformEnum.OOT, "fp8")
    compat.register_fp8_block_kernel(OpsetFp8LinearKernel)
    compat.quantise_weights(scaled_fp8_quant)
