"""The shapes that tensors of gpt-oss's experts must have in a checkpoint, by config.json.

gpt-oss loads one tensor for all experts, by its own code. So it does not call the loader that `expert_shapes` checks.
"""

import math
import re
from collections.abc import Iterable, Iterator

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts

from vllm_opset.model.loading import Misfit
from vllm_opset.model.mxfp4_experts import STORED, OpsetMxfp4ExpertsMethod, named
from vllm_opset.ops.schemes import MXFP4

# A tensor's name in vLLM's model: its layer, its expert if it is that of a single one, and its parameter.
TENSOR = re.compile(r"(.+\.experts)(?:\.routed_experts)?(?:\.(\d+))?\.(\w+)")


def checked(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that vLLM is about to load into gpt-oss, with checks of the shapes of its experts.

    Checked are unquantised checkpoints, and layers in MXFP4 that opset serves. Raises Misfit, with its name, for a
    tensor that has not the shape of config.json.
    """
    is_unquantised = getattr(model.config, "quantization_config", None) is None
    layers = {
        name.removesuffix(".routed_experts"): layer
        for name, layer in model.named_modules()
        if isinstance(layer, RoutedExperts) and (is_unquantised or _is_mxfp4(layer))
    }
    for name, tensor in weights:
        found = TENSOR.fullmatch(name)
        if found and found[1] in layers and found[3] in STORED:
            _check_shape(layers[found[1]], found[3], tensor, found[2])
        yield name, tensor


def _is_mxfp4(layer: RoutedExperts) -> bool:
    return isinstance(layer.quant_method, OpsetMxfp4ExpertsMethod)


def _check_shape(layer: RoutedExperts, name: str, tensor: torch.Tensor, expert: str | None) -> None:
    """vLLM flattens the groups of a row of blocks, so these may have any number of dimensions."""
    expected, rows = (layer.global_num_experts, *_of_expert(layer, name)), 2
    if expert is not None:
        expected, rows = expected[1:], 1
    found, wanted = ((*shape[:rows], math.prod(shape[rows:])) for shape in (tensor.shape, expected))
    if found != wanted:
        of_expert = "" if expert is None else f" of expert {expert}"
        raise Misfit(
            f"{named(layer, name)}{of_expert} cannot be loaded: {list(tensor.shape)} in the checkpoint, and "
            f"config.json asks for {list(expected)}"
        )


def _of_expert(layer: RoutedExperts, name: str) -> tuple[int, ...]:
    """The shape of one expert's part of a tensor. Weights that are not quantised are stored as their transposes."""
    weight, _, kind = name.partition("_")
    hidden_size, width = layer.moe_config.hidden_dim_unpadded, layer.moe_config.intermediate_size
    rows, columns = (2 * width, hidden_size) if weight == "w13" else (hidden_size, width)
    if kind == "bias":
        return (rows,)
    if not _is_mxfp4(layer):
        return columns, rows
    groups = columns // MXFP4.group.columns
    return (rows, groups) if kind == "weight_scale" else (rows, groups, MXFP4.group.columns // 2)
