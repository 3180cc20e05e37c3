"""The arguments of fused_experts, and what must hold for them. The op and its kernels share this one list."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from vllm_opset.ops._strides import check_contiguous, check_rows
from vllm_opset.ops.contract import Op, accumulator
from vllm_opset.ops.moe import _activations, _quantised
from vllm_opset.ops.schemes import PER_TENSOR


@dataclass(slots=True, eq=False)
class FusedExpertsArguments:
    """The contract of fused_experts describes each one."""

    hidden_states: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    activation: str = "silu"
    w1_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    expert_map: torch.Tensor | None = None
    apply_router_weight_on_input: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    swiglu_beta: float | None = None
    shared_output: torch.Tensor | None = None
    w1_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    quant_dtype: torch.dtype | None = None
    group_shape: list[int] | None = None
    a1_scale: torch.Tensor | None = None
    a2_scale: torch.Tensor | None = None
    w1_zero_point: torch.Tensor | None = None
    w2_zero_point: torch.Tensor | None = None

    def check(self) -> tuple[Op, Mapping[str, float | str]]:
        """The op of the activation, and its keyword arguments. Raises ValueError as the contract says."""
        act = _activations.find(self.activation, self.swiglu_limit, self.swiglu_alpha, self.swiglu_beta)
        self._check_weights()
        self._check_activations()
        self._check_choices()
        return act

    def _check_weights(self) -> None:
        dtype, (num_tokens, hidden_size) = self.hidden_states.dtype, self.hidden_states.shape
        num_experts, rows, _ = self.w1.shape
        halves = 2 if self.activation in _activations.GATED else 1
        width = rows // halves
        if (self.w1_scale is None) != (self.w2_scale is None):
            raise ValueError("both weights must have scales, or none")
        if (self.w1_zero_point is None) != (self.w2_zero_point is None):
            raise ValueError("both weights must have zero points, or none")
        w1_shape, w2_shape = (num_experts, halves * width, hidden_size), (num_experts, hidden_size, width)
        _quantised.check_weight("w1", self.w1, self.w1_scale, w1_shape, dtype, self.w1_zero_point)
        _quantised.check_weight("w2", self.w2, self.w2_scale, w2_shape, dtype, self.w2_zero_point)
        if self.w1_scale is not None and self.out_dtype != dtype:
            raise ValueError(f"quantised weights need out_dtype {dtype}, that of hidden_states, not {self.out_dtype}")
        expected = {
            "w1_bias": (self.w1_bias, (num_experts, rows)),
            "w2_bias": (self.w2_bias, (num_experts, hidden_size)),
            "shared_output": (self.shared_output, (num_tokens, hidden_size)),
        }
        for name, (tensor, shape) in expected.items():
            if tensor is not None and (tensor.shape != shape or tensor.dtype != dtype):
                raise ValueError(f"{name} must be {dtype} {list(shape)}, not {tensor.dtype} {list(tensor.shape)}")
        check_rows("hidden_states", self.hidden_states)
        check_contiguous(w1_bias=self.w1_bias, w2_bias=self.w2_bias, shared_output=self.shared_output)

    def _check_activations(self) -> None:
        static = [scale is not None for scale in (self.a1_scale, self.a2_scale)]
        if self.quant_dtype is None:
            if self.group_shape is not None or any(static):
                raise ValueError("scales of activations need the dtype to which these are quantised")
            return
        if self.w1_scale is None or self.group_shape is None:
            raise ValueError("activations are quantised for quantised weights, in groups of some shape")
        one_scale = tuple(self.group_shape) == PER_TENSOR
        if static != [one_scale, one_scale]:
            raise ValueError("one scale for all tokens must be given for both products; others come from each token")
        if not one_scale and self.group_shape[0] != 1:
            raise ValueError(f"groups of activations have one row, not those of {list(self.group_shape)}")

    def _check_choices(self) -> None:
        ids, weights, num_tokens = self.topk_ids, self.topk_weights, self.hidden_states.shape[0]
        if ids.ndim != 2 or ids.shape[0] != num_tokens or weights.shape != ids.shape:
            raise ValueError(f"no experts {list(ids.shape)} and weights {list(weights.shape)} for {num_tokens} tokens")
        expected = {
            "topk_ids": (ids, {torch.int32}),
            "topk_weights": (weights, {torch.float32, accumulator(self.hidden_states)}),
            "expert_map": (self.expert_map, {torch.int32}),
        }
        for name, (tensor, dtypes) in expected.items():
            if tensor is not None and (tensor.dtype not in dtypes or not tensor.is_contiguous()):
                wanted = " or ".join(map(str, dtypes))
                raise ValueError(f"{name} must be contiguous and {wanted}, not {tensor.dtype} {tensor.stride()}")
        if self.apply_router_weight_on_input and ids.shape[1] != 1:
            raise ValueError(f"the input can have the weight of one expert a token, not of {ids.shape[1]}")


def takes_arguments(run: Callable) -> Callable:
    """`run(args, …)` as a function of the arguments themselves. Its other parameters are given by name."""
    signature = inspect.signature(run)
    others = [*signature.parameters.values()][1:]
    names = [parameter.name for parameter in others]

    @functools.wraps(run)
    def with_arguments(*args, **kwargs):
        own = {name: kwargs.pop(name) for name in names if name in kwargs}
        return run(FusedExpertsArguments(*args, **kwargs), **own)

    parameters = inspect.signature(FusedExpertsArguments).parameters.values()
    with_arguments.__signature__ = signature.replace(parameters=[*parameters, *others])
    return with_arguments
