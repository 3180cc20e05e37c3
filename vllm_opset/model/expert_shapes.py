"""The shapes that tensors of experts must have in a checkpoint, by config.json.

vLLM's loader of experts takes tensors of other sizes too. It fills as much of the parameter as a small one covers, or
repeats it. So `loading.watch` has the shapes checked first.
"""

import torch

PER_CHANNEL, BY_BLOCKS = "channel", "block"  # vLLM's names of granularities
HALVES = ("w1", "w3")  # of the first weight


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
    shape = _of_expert(layer, name, parameter, shard, is_bias)
    if stored.ndim == 3:
        shape = [len(parameter), *shape]
    if list(stored.shape) != shape:
        raise ValueError(f"config.json asks for {shape}, in all workers")


def _of_expert(layer: torch.nn.Module, name: str, parameter: torch.Tensor, shard: str, is_bias: bool) -> list[int]:
    moe, sizes = layer.moe_config, list(parameter.shape[1:])
    granularity = getattr(parameter, "quant_method", None) if "scale" in name or "zero" in name else None
    outputs = int(getattr(parameter, "is_transposed", False) and not is_bias)
    if shard in HALVES and moe.is_act_and_mul:
        sizes[outputs] //= 2
    if shard in HALVES or not (is_bias or granularity == PER_CHANNEL):
        shared = outputs if shard in HALVES else 1 - outputs  # the dimension that tensor-parallel workers share
        sizes[shared] = sizes[shared] * moe.intermediate_size // moe.intermediate_size_per_partition
    if granularity == BY_BLOCKS:
        finer = getattr(layer.quant_method, "weight_scale_refine", None) or (1, 1)  # than the blocks of the checkpoint
        sizes = [-(-size // times) for size, times in zip(sizes, finer, strict=True)]
    return sizes
