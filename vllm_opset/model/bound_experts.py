"""Experts of a model that stock vLLM has loaded, computed by opset's kernels.

vLLM's registry of custom ops (`experts.register`) would replace the method of every layer while it is built, also of
layers that opset does not serve. After loading, a layer's method, router and backend are known, and each layer that
opset does not serve keeps vLLM's. By then, experts with int4 and MXFP4 weights have opset's methods
(`replaced_methods`).
"""

from collections import Counter
from collections.abc import Callable

import torch
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, MoERunner
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend, make_fp8_moe_kernel
from vllm.model_executor.layers.fused_moe.oracle.int8 import Int8MoeBackend, make_int8_moe_kernel
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.router.custom_routing_router import CustomRoutingRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from vllm_opset.model.experts import ExpertsMethod, MonolithicMethod, why_not
from vllm_opset.model.mxfp4_experts import OpsetMxfp4ExpertsMethod
from vllm_opset.model.quantised_experts import FP8_METHODS, INT8_METHOD, OpsetQuantisedExperts
from vllm_opset.unsupported import Refusal

# The routers that choose by the scores alone, as ops.route does.
ROUTERS = (CustomRoutingRouter, FusedTopKBiasRouter, FusedTopKRouter, GroupedTopKRouter)
# What FusedTopKBiasRouter chooses by beside the scores. Releases differ in what it has.
BESIDE_SCORES = ("_hash_indices_table", "bias_vl")


class BoundExpertsMethod(ExpertsMethod):
    """The method of one layer's experts. It keeps vLLM's kernel, which tells the runner that nothing was summed yet."""

    def __init__(self, layer: torch.nn.Module) -> None:
        replaced = layer.quant_method
        super().__init__(replaced.moe)
        self.moe_quant_config, self.moe_kernel = replaced.moe_quant_config, replaced.moe_kernel
        self.choose(layer)


def bind(model: torch.nn.Module) -> Counter[str]:
    """Let opset compute the experts of a model that was just loaded, under vLLM's current config.

    Returns the number of layers that keep vLLM's method, by the reason. Raises Refusal for a layer whose weights
    opset's method has loaded, and that opset does not serve.
    """
    kept: Counter[str] = Counter()
    for runner in model.modules():
        if isinstance(runner, MoERunner):
            if reason := why_vllms(runner):
                _check_that_vllm_can(runner.routed_experts, reason)
                kept[reason] += 1
            else:
                _bind(runner)
    return kept


def _bind(runner: MoERunner) -> None:
    layer, method = runner.routed_experts, runner.routed_experts.quant_method
    if isinstance(method, OpsetMxfp4ExpertsMethod):
        method.bind(layer)
    elif isinstance(method, FP8_METHODS):
        _replace_kernel(layer, make_fp8_moe_kernel, fp8_backend=method.fp8_backend)
    elif isinstance(method, INT8_METHOD):
        _replace_kernel(layer, make_int8_moe_kernel, int8_backend=method.int8_backend)
    elif not isinstance(method, MonolithicMethod):
        runner._replace_quant_method(BoundExpertsMethod(layer))


def _check_that_vllm_can(layer: torch.nn.Module, reason: str) -> None:
    if isinstance(layer.quant_method, MonolithicMethod):
        raise Refusal(f"vllm-opset's moe does not support {reason} in {layer.layer_name}: switch this part off.")


def _replace_kernel(layer: torch.nn.Module, make: Callable, **backend: object) -> None:
    """Give experts with fp8 or int8 weights opset's kernel.

    vLLM's method makes the same one if weights are loaded again.
    """
    method = layer.quant_method
    method.experts_cls = OpsetQuantisedExperts
    method.moe_kernel = make(
        moe_quant_config=method.moe_quant_config, moe_config=method.moe, experts_cls=OpsetQuantisedExperts, **backend
    )
    method.moe_kernel.fused_experts.bind(layer)


def why_vllms(runner: MoERunner) -> str | None:
    """Why vLLM's own kernels compute the experts of a layer; None if opset's can."""
    layer, method = runner.routed_experts, runner.routed_experts.quant_method
    if type(runner) is not MoERunner:
        return f"the model's own {type(runner).__name__}"
    if not isinstance(method, MonolithicMethod) and (reason := _why_not_stored_so(method)):
        return reason
    if type(runner.router) not in ROUTERS or any(
        getattr(runner.router, name, None) is not None for name in BESIDE_SCORES
    ):
        return f"this choice of experts ({type(runner.router).__name__})"
    return why_not(layer)


def _why_not_stored_so(method: FusedMoEMethodBase) -> str | None:
    """Why opset's kernels cannot read the weights as a method of vLLM's stored them; None if they can."""
    if type(method) is UnquantizedFusedMoEMethod:
        backend, triton = method.unquantized_backend, UnquantizedMoeBackend.TRITON
    elif isinstance(method, FP8_METHODS):
        backend, triton = method.fp8_backend, Fp8MoeBackend.TRITON
    elif isinstance(method, INT8_METHOD):
        backend, triton = method.int8_backend, Int8MoeBackend.TRITON
    else:
        return f"the weights of {type(method).__name__}"
    # Other kernels of vLLM store the weights in another order.
    return None if backend is triton else f"weights that are stored for {backend.value}"
