"""vLLM's experts with int4 weights by groups: compressed-tensors, GPTQ and AWQ, by ops.route and ops.fused_experts.

vLLM's methods of these formats choose among backends that need compiled kernels, also to create the weights. The
methods here take their places, also on stock vLLM (`replaced_methods`). They create the weights in the checkpoint's
layout, which vLLM's loader fills, and then convert these once to the layout of `ops/schemes`.
"""

from collections.abc import Iterator

import torch
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.utils import set_weight_attrs

from vllm_opset.model.experts import Experts, MonolithicMethod, experts_of
from vllm_opset.model.int4_linear import nibbles, nibbles_of_awq
from vllm_opset.model.loading import check_columns, check_experts, refusal, watch
from vllm_opset.model.reloading import refilled
from vllm_opset.ops.schemes import (
    PER_ROW,
    UINT4,
    UINT4_BLOCK,
    WHOLE,
    GroupShape,
    Scheme,
    check_scale,
    packed,
    quantised,
)
from vllm_opset.unsupported import ANOTHER_MODEL

Parameter = tuple[str, tuple[int, ...], torch.dtype | None]  # its name, its shape and its dtype
IN_INT32 = 8  # values of 4 bits
ARGUMENTS = {"w13": "w1", "w2": "w2"}  # vLLM's names of the weights, and those of fused_experts
# The attribute of a layer with the names of the biases that vLLM has loaded. vLLM 0.26 loads none.
LOADED_BIASES = "_loaded_expert_biases"


class Int4ExpertsMethod(MonolithicMethod, FusedMoEMethodBase):
    """The method of one layer's experts, for all formats. group_size: the columns that share a scale, or WHOLE."""

    # The names of the parameters, after "w13_" and "w2_".
    weight_name = "qweight"
    scale_name = "scales"
    zero_point_name = "qzeros"
    is_transposed = True  # whether a weight's rows are its inputs, as the loader has to know
    stores_biases = False  # whether checkpoints may have biases of experts that the model does not declare

    def __init__(self, moe: FusedMoEConfig, group_size: int, has_zero_points: bool) -> None:
        super().__init__(moe)
        self.group_size, self.has_zero_points = group_size, has_zero_points

    def shapes(self, outputs: int, inputs: int, groups: int) -> Iterator[Parameter]:
        """The name, the shape and the dtype of each parameter of one expert's weight; None for the model's dtype."""
        raise NotImplementedError

    def values(self, weight: torch.Tensor) -> torch.Tensor:
        """The values of one expert's weight, uint8 [outputs, inputs]."""
        raise NotImplementedError

    def zero_points(self, stored: torch.Tensor) -> torch.Tensor:
        """The zero points of one expert's weight, uint8 [outputs, groups]."""
        raise NotImplementedError

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes,
    ) -> None:
        """Raises Refusal for declared biases, and for weights whose rows are no whole groups of one scale."""
        if self.moe.has_bias:
            raise refusal(f"int4 experts with biases in {layer.layer_name}", ANOTHER_MODEL)
        attributes |= {"is_transposed": self.is_transposed}
        attributes["quant_method"] = "channel" if self.group_size == WHOLE else "group"
        halves = 2 if self.moe.is_act_and_mul else 1
        sizes = (halves * intermediate_size_per_partition, hidden_size), (hidden_size, intermediate_size_per_partition)
        for inputs, workers in ((hidden_size, 1), (intermediate_size_per_partition, self.moe.tp_size)):
            check_columns(layer, "int4 experts", inputs, self.multiple, workers)
        for weight, (outputs, inputs) in zip(ARGUMENTS, sizes, strict=True):
            parameters = {
                name: torch.empty(num_experts, *shape, dtype=dtype or params_dtype)
                for name, shape, dtype in self.shapes(outputs, inputs, self._groups(inputs))
            }
            if self.stores_biases and hasattr(layer, LOADED_BIASES):
                parameters["bias"] = torch.zeros(num_experts, outputs, dtype=params_dtype)
            for name, data in parameters.items():
                parameter = torch.nn.Parameter(data, requires_grad=False)
                layer.register_parameter(f"{weight}_{name}", parameter)
                set_weight_attrs(parameter, attributes)
        watch(layer)

    @property
    def multiple(self) -> int:
        """The number of columns is a multiple of this."""
        return UINT4_BLOCK if self.group_size == WHOLE else self.group_size

    def _groups(self, inputs: int) -> int:
        return 1 if self.group_size == WHOLE else inputs // self.multiple

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Convert the weights and choose the kernels.

        Raises ValueError, with its name, for a damaged scale and for a tensor that the checkpoint lacks.
        """
        check_experts(layer, (self.weight_name, *([self.zero_point_name] if self.has_zero_points else [])))
        self._settle_biases(layer)
        how = {"out_dtype": self.moe.in_dtype}
        for weight, argument in ARGUMENTS.items():
            stored = getattr(layer, f"{weight}_{self.weight_name}")
            values, scale, zeros = self._converted(layer, weight)
            setattr(layer, f"{weight}_weight", refilled(getattr(layer, f"{weight}_weight", None), values))
            how |= {f"{argument}_scale": scale}
            if zeros is not None:
                how |= {f"{argument}_zero_point": zeros}
            stored.data = stored.data.new_empty(0)
        scheme = Scheme(quantised(values[0], scale[0], None if zeros is None else zeros[0]))
        Experts(layer, self.moe, scheme, **how).prepare()

    def _settle_biases(self, layer: RoutedExperts) -> None:
        """Drop biases that are zero. A layer that had some before keeps zeros, because captured graphs read them."""
        before, loaded = experts_of(layer), getattr(layer, LOADED_BIASES, set())
        for weight, argument in ARGUMENTS.items():
            name = f"{weight}_bias"
            bias = getattr(layer, name, None)
            if bias is None:
                continue
            if name not in loaded:
                bias.data.zero_()  # if weights are loaded again, its memory holds anything
            if not bias.any() and (before is None or not before.takes(f"{argument}_bias")):
                layer.register_parameter(name, None)
        loaded.clear()  # vLLM only adds to it, so the next load would find the biases of this one

    def _converted(self, layer: RoutedExperts, weight: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The packed values of a weight [num_experts, …], its scales and its zero points in the contract's layout."""
        stored, name = getattr(layer, f"{weight}_{self.weight_name}").data, f"{weight}_{self.scale_name}"
        scale = getattr(layer, name).data
        scale = (scale.mT if self.is_transposed else scale).contiguous()
        values = torch.stack([packed(self.values(own), UINT4) for own in stored])
        group = PER_ROW if scale.shape[-1] == 1 else GroupShape(1, self.group_size)
        check_scale(f"{layer.layer_name}.{name}", scale, (*scale.shape[:2], 2 * values.shape[-1]), group)
        if not self.has_zero_points:
            return values, scale, None
        zeros = getattr(layer, f"{weight}_{self.zero_point_name}").data
        return values, scale, torch.stack([self.zero_points(own) for own in zeros]).contiguous()

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """None: no kernel of vLLM's runs."""


class OpsetCompressedExpertsMethod(Int4ExpertsMethod):
    """compressed-tensors' pack-quantized: weights are packed along inputs, and zero points along outputs."""

    weight_name, scale_name, zero_point_name = "weight_packed", "weight_scale", "weight_zero_point"
    is_transposed = False

    def __init__(self, weight_quant, input_quant, moe: FusedMoEConfig, layer_name: str | None = None) -> None:
        super().__init__(moe, weight_quant.group_size or WHOLE, not weight_quant.symmetric)

    def shapes(self, outputs: int, inputs: int, groups: int) -> Iterator[Parameter]:
        yield self.weight_name, (outputs, inputs // IN_INT32), torch.int32
        yield self.scale_name, (outputs, groups), None
        yield "weight_shape", (2,), torch.int64
        if self.has_zero_points:
            yield self.zero_point_name, (outputs // IN_INT32, groups), torch.int32

    def values(self, weight: torch.Tensor) -> torch.Tensor:
        return nibbles(weight)

    def zero_points(self, stored: torch.Tensor) -> torch.Tensor:
        return nibbles(stored.t()).t()


class OpsetAwqExpertsMethod(Int4ExpertsMethod):
    """AWQ's format: weights are packed along outputs, in AWQ's own order."""

    def __init__(self, quant_config, moe: FusedMoEConfig) -> None:
        super().__init__(moe, quant_config.group_size, has_zero_points=True)

    def shapes(self, outputs: int, inputs: int, groups: int) -> Iterator[Parameter]:
        yield self.weight_name, (inputs, outputs // IN_INT32), torch.int32
        yield self.scale_name, (groups, outputs), None
        yield self.zero_point_name, (groups, outputs // IN_INT32), torch.int32

    def values(self, weight: torch.Tensor) -> torch.Tensor:
        return nibbles_of_awq(weight).t()

    def zero_points(self, stored: torch.Tensor) -> torch.Tensor:
        return nibbles_of_awq(stored).t()


class OpsetGptqExpertsMethod(Int4ExpertsMethod):
    """GPTQ's format: weights are packed along inputs. Symmetric weights have zero points too, all in the middle."""

    stores_biases = True

    def __init__(self, quant_config, moe: FusedMoEConfig) -> None:
        super().__init__(moe, quant_config.group_size, has_zero_points=False)

    def shapes(self, outputs: int, inputs: int, groups: int) -> Iterator[Parameter]:
        yield self.weight_name, (inputs // IN_INT32, outputs), torch.int32
        yield self.scale_name, (groups, outputs), None
        yield self.zero_point_name, (groups, outputs // IN_INT32), torch.int32
        yield "g_idx", (inputs,), torch.int32  # that vLLM 0.26 to 0.29 look for; all are in order

    def values(self, weight: torch.Tensor) -> torch.Tensor:
        return nibbles(weight.t())
