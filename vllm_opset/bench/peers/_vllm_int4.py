"""int4 weights in vLLM's kernels for them: the one that vLLM chooses, which is Machete or Marlin on NVIDIA GPUs."""

import dataclasses
import importlib

import torch

from vllm_opset.ops.schemes import PER_ROW, UINT4, quantised, unpacked

LINEAR = "vllm.model_executor.kernels.linear"
PARAMETER = "vllm.model_executor.parameter"
BITS = 4
VALUES = 32 // BITS  # in an int32, the first of them in its low bits


class Int4Weight:
    """A weight that vLLM's kernel has prepared."""

    def __init__(self, weight, scale, zero_point, dtype: torch.dtype) -> None:
        values = unpacked(weight, UINT4)
        group = quantised(weight, scale, zero_point).group
        sizes = (values.shape[1], values.shape[0])  # of vLLM's [in, out]
        self._kernel = _kernel_class(sizes, group, zero_point is not None, dtype)
        self._layer = torch.nn.Module()
        # As checkpoints of compressed-tensors have them: inputs are packed in the weight, and outputs in zero points.
        self._register("weight_packed", in_int32(values), packed_dim=1)
        self._register("weight_scale", scale.to(dtype))
        if zero_point is not None:
            self._register("weight_zero_point", in_int32(zero_point.T).T.contiguous(), packed_dim=0)
        self._kernel.process_weights_after_loading(self._layer)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._kernel.apply_weights(self._layer, x, bias)

    def _register(self, name: str, data: torch.Tensor, **dimensions: int) -> None:
        self._layer.register_parameter(name, _parameter(data, input_dim=1, output_dim=0, **dimensions))


def in_int32(values: torch.Tensor) -> torch.Tensor:
    """Values from 0 to 15 [rows, columns] as int32 [rows, columns / 8]."""
    shifts = torch.arange(0, 32, BITS, device=values.device)
    words = (values.long().unflatten(1, (-1, VALUES)) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def _kernel_class(sizes: tuple[int, int], group, zero_points: bool, dtype: torch.dtype):
    linear = importlib.import_module(LINEAR)
    types = importlib.import_module("vllm.scalar_type").scalar_types
    config = importlib.import_module(f"{LINEAR}.mixed_precision.MPLinearKernel").MPLinearLayerConfig
    known = {
        "full_weight_shape": sizes,
        "partition_weight_shape": sizes,
        "weight_type": types.uint4 if zero_points else types.uint4b8,
        "act_type": dtype,
        "group_size": -1 if group == PER_ROW else group.columns,
        "zero_points": zero_points,
        "has_g_idx": False,  # the order of inputs in GPTQ's act-order, which vLLM 0.33 no longer has
    }
    fields = {field.name for field in dataclasses.fields(config)}
    config = config(**{name: value for name, value in known.items() if name in fields})
    return linear.choose_mp_linear_kernel(config)(config, "weight_packed", "weight_scale", "weight_zero_point")


def _parameter(data: torch.Tensor, **dimensions: int) -> torch.nn.Parameter:
    """A parameter of vLLM's type without a loader, whose constructor would ask for the tensor-parallel group."""
    base = importlib.import_module(PARAMETER).BasevLLMParameter
    parameter = base.__new__(base, data)
    for name, dimension in dimensions.items():
        setattr(parameter, name, dimension)
    return parameter
