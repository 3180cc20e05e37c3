"""The shapes that tensors of experts must have in a checkpoint, by config.json.

vLLM's loader of experts takes tensors of other sizes too. It fills as much of the parameter as a small one covers, or
repeats it. So `checked` compares the shapes first. gpt-oss has a loader of its own (`gpt_oss_shapes`).
"""

import functools
import inspect
from collections.abc import Callable

import torch

from vllm_opset.model.experts import MonolithicMethod
from vllm_opset.model.loading import naming, prefix_of
from vllm_opset.model.quantised_experts import FP8_METHODS, INT8_METHOD

PER_CHANNEL, BY_BLOCKS = "channel", "block"  # vLLM's names of granularities
HALVES = ("w1", "w3")  # of the first weight
# Methods of layers whose parameters are all as `check_shape` takes them: opset's own, and those that opset serves.
KNOWN = (MonolithicMethod, *FP8_METHODS, INT8_METHOD)


def checked(load: Callable) -> Callable:
    """vLLM's loader of a tensor of experts, `RoutedExperts.weight_loader`, with a check of its shape.

    It then raises Misfit, with the name of the tensor and the first error, for one that it cannot load.
    """
    signature = inspect.signature(load)

    @functools.wraps(load)
    def weight_loader(self, *args, **kwargs):
        given = signature.bind(self, *args, **kwargs).arguments
        parameter, stored, shard = given["param"], given["loaded_weight"], given["shard_id"]
        name = given["weight_name"].rpartition(".")[2]
        with naming(f"{prefix_of(self)}.{name}", (shard, given["expert_id"]), parameter, stored):
            check_shape(self, name, parameter, stored, shard)
            return load(self, *args, **kwargs)

    return weight_loader


def check_shape(
    layer: torch.nn.Module, name: str, parameter: torch.Tensor, stored: torch.Tensor, shard: str | None
) -> None:
    """Raise ValueError for a tensor of another shape than that of a whole expert, or of all experts of this worker.

    It passes tensors whose size vLLM checks, such as the one scale of a weight, and those that opset does not read.

    layer: vLLM's layer of experts. name: that of the parameter, which has the parts of this worker's experts.
    stored: the tensor of the checkpoint. shard: "w1", "w2" or "w3".
    """
    is_bias = name.endswith("bias")
    if shard not in (*HALVES, "w2") or parameter.ndim != (2 if is_bias else 3):
        return
    if not (isinstance(layer.quant_method, KNOWN) or _is_stored_as_it_is(layer, name, parameter)):
        return
    shape = _of_expert(layer, name, parameter, shard, is_bias)
    if stored.ndim == 3:
        shape = [len(parameter), *shape]
    if list(stored.shape) != shape:
        raise ValueError(f"config.json asks for {shape}, in all workers")


def _is_stored_as_it_is(layer: torch.nn.Module, name: str, parameter: torch.Tensor) -> bool:
    """Whether a parameter has a number for each one of the weight or the bias, in the same order."""
    moe = layer.moe_config
    width, hidden_size = moe.intermediate_size_per_partition, moe.hidden_dim
    rows = (2 if moe.is_act_and_mul else 1) * width
    shapes = {"w13_weight": (rows, hidden_size), "w2_weight": (hidden_size, width)}
    shapes |= {"w13_bias": (rows,), "w2_bias": (hidden_size,)}
    return tuple(parameter.shape[1:]) == shapes.get(name)


def _of_expert(layer: torch.nn.Module, name: str, parameter: torch.Tensor, shard: str, is_bias: bool) -> list[int]:
    """The shape of one expert's tensor, in all workers, by the shape of the parameter that this worker loads it into.

    Tensor-parallel workers share the intermediate size, and the parameter may be padded in it and in the hidden size.
    """
    moe, sizes = layer.moe_config, list(parameter.shape[1:])
    granularity = getattr(parameter, "quant_method", None) if "scale" in name or "zero" in name else None
    width = moe.intermediate_size_per_partition_unpadded * moe.tp_size, moe.intermediate_size_per_partition
    hidden_size = moe.hidden_dim_unpadded, moe.hidden_dim
    of_outputs, of_inputs = (width, hidden_size) if shard in HALVES else (hidden_size, width)
    outputs = int(getattr(parameter, "is_transposed", False) and not is_bias)  # their dimension
    if shard in HALVES and moe.is_act_and_mul:
        sizes[outputs] //= 2
    sizes[outputs] = _whole(sizes[outputs], *of_outputs)
    if not is_bias and granularity != PER_CHANNEL:
        sizes[1 - outputs] = _whole(sizes[1 - outputs], *of_inputs)
    if granularity == BY_BLOCKS:
        finer = getattr(layer.quant_method, "weight_scale_refine", None) or (1, 1)  # than the blocks of the checkpoint
        sizes = [-(-size // times) for size, times in zip(sizes, finer, strict=True)]
    return sizes


def _whole(size: int, all_workers: int, own: int) -> int:
    """A size of the parameter without padding and in all workers, as `all_workers` is to this worker's `own`."""
    return -(-size * all_workers // own)
