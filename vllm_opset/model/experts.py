"""vLLM's experts with unquantised weights, by ops.route and ops.fused_experts.

vLLM leaves the experts of an out-of-tree platform to a plugin, by the registry of custom ops. On vLLM's own
platform, loaded layers get it otherwise (`bound_experts`). vLLM's runner keeps what is around them: shared experts,
transforms of the input, and the sum over tensor-parallel ranks. The method here is "monolithic" in vLLM's words: it
gets the logits of the router, so that opset also chooses the experts.
"""

import torch
from torch._C import DisableTorchFunctionSubclass
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from vllm_opset import ops
from vllm_opset.model.layers import Kernels
from vllm_opset.ops.moe import _activations
from vllm_opset.ops.moe.fused_experts import check_expert_map
from vllm_opset.ops.moe.route import SCORING_FUNCS
from vllm_opset.unsupported import Refusal
from vllm_opset.variants import powers_up_to

ANOTHER_MODEL = "choose another model"


class ExpertsMethod(UnquantizedFusedMoEMethod):
    """The method of one layer's experts. The weights stay as they are, and are looked up at every call."""

    is_monolithic = True

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Choose the kernels. Raises Refusal for what they do not cover."""
        super().process_weights_after_loading(layer)
        if reason := why_not(layer):
            raise Refusal(f"vllm-opset does not support {reason} in {layer.layer_name}: {ANOTHER_MODEL}.")
        self.choose(layer)

    def choose(self, layer: torch.nn.Module) -> None:
        """Choose the kernels for weights that are ready. Raises ValueError for a wrong expert map."""
        if layer.expert_map is not None:
            check_expert_map(layer.expert_map, len(layer.w13_weight), f"{layer.layer_name}.expert_map")
        known = {"num_experts": layer.global_num_experts, "top_k": layer.top_k}
        self._route = Kernels(ops.route, lambda: known, compiled=False)
        self._experts = Kernels(ops.fused_experts, dict, compiled=False)
        # Chosen now, so that the report at start-up names them.
        self._route[self.logits_dtype(layer)]
        self._experts[layer.w13_weight.dtype]
        self._arguments = {
            "activation": layer.activation.value,
            "w1_bias": getattr(layer, "w13_bias", None),
            "w2_bias": getattr(layer, "w2_bias", None),
            "expert_map": layer.expert_map,
            "apply_router_weight_on_input": layer.apply_router_weight_on_input,
            "swiglu_limit": layer.swiglu_limit,
            "swiglu_alpha": layer.swiglu_alpha,
            "swiglu_beta": layer.swiglu_beta,
        }

    def logits_dtype(self, layer: torch.nn.Module) -> torch.dtype:
        """Of the router's logits, as far as the layer knows it."""
        return self.moe.router_logits_dtype or layer.w13_weight.dtype

    def apply_monolithic(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # vLLM's parameters are subclasses of Tensor: PyTorch would dispatch every call through __torch_function__.
        with DisableTorchFunctionSubclass():
            weights, ids = self._choose(layer, x, router_logits)
            return self._experts[x.dtype](x, layer.w13_weight, layer.w2_weight, weights, ids, **self._arguments)

    def _choose(self, layer, x, router_logits) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token and their weights. A model's own function for this is the model's code."""
        if layer.custom_routing_function is not None:
            weights, ids = layer.custom_routing_function(
                hidden_states=x, gating_output=router_logits, topk=layer.top_k, renormalize=layer.renormalize
            )
            return weights.float().contiguous(), ids.int().contiguous()
        groups = _groups(layer, router_logits.shape[1])
        return self._route[router_logits.dtype](
            router_logits,
            layer.top_k,
            layer.scoring_func,
            layer.renormalize,
            layer.routed_scaling_factor,
            layer.e_score_correction_bias,
            *groups,
        )


def _groups(layer: torch.nn.Module, num_experts: int) -> tuple[int, int]:
    """The number of groups, and of those that compete. As in vLLM, experts that make no groups all compete."""
    groups = layer.num_expert_group
    if not layer.use_grouped_topk or num_experts <= groups or num_experts % groups:
        return 1, 1
    return groups, layer.topk_group


def why_not(layer: torch.nn.Module) -> str | None:
    """What the contracts do not express of a layer's experts; None if they express all."""
    if layer.custom_routing_function is None and layer.scoring_func not in SCORING_FUNCS:
        return f"the scores {layer.scoring_func}"
    try:
        _activations.find(layer.activation.value, layer.swiglu_limit, layer.swiglu_alpha, layer.swiglu_beta)
    except ValueError as error:
        return f"this activation ({error})"
    return None


def multiply(model: torch.nn.Module, most_tokens: int) -> None:
    """Call a layer of each shape with 1, 2, 4 … and the most tokens, so that all of its kernels are compiled.

    Each kernel's launches change at numbers of tokens that are at least a factor of two apart, so these reach them all.
    """
    kinds = {}
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, ExpertsMethod):
            kinds[layer.w13_weight.shape, layer.w2_weight.shape] = layer, method
    for layer, method in kinds.values():
        for num_tokens in powers_up_to(most_tokens):
            x = layer.w13_weight.new_zeros((num_tokens, layer.w13_weight.shape[2]))
            logits = x.new_zeros((num_tokens, layer.global_num_experts), dtype=method.logits_dtype(layer))
            method.apply_monolithic(layer, x, logits)


def register() -> None:
    """Register the method with vLLM, once in a process, whose engines may come one after the other."""
    name = UnquantizedFusedMoEMethod.name
    if UnquantizedFusedMoEMethod.__name__ in op_registry_oot:
        return
    UnquantizedFusedMoEMethod.register_oot(ExpertsMethod)
    # register_oot has set the name to that of our class. Users switch the op on and off by the original name.
    ExpertsMethod.name = name
