"""vLLM's experts, by ops.route and ops.fused_experts, and their registration for unquantised weights.

vLLM leaves unquantised experts of an out-of-tree platform to a plugin, by the registry of custom ops. On vLLM's own
platform, loaded layers get them otherwise (`bound_experts`). vLLM's runner keeps what is around them: shared experts,
transforms of the input, and the sum over tensor-parallel ranks. Methods here are "monolithic" in vLLM's words: they get
the logits of the router, so that opset also chooses the experts. For quantised weights, see `quantised_experts`.
"""

import torch
from torch._C import DisableTorchFunctionSubclass
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.runner import moe_runner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.platforms import current_platform

from vllm_opset import ops, selection
from vllm_opset.model.layers import Kernels
from vllm_opset.model.loading import check_experts, refusal, watch
from vllm_opset.model.reloading import refilled
from vllm_opset.ops.moe import _activations
from vllm_opset.ops.moe.fused_experts import FusedExpertsProblem, check_expert_map, sizes_of
from vllm_opset.ops.moe.route import SCORING_FUNCS
from vllm_opset.ops.schemes import NONE, Scheme, values_shape
from vllm_opset.unsupported import ANOTHER_MODEL
from vllm_opset.variants import powers_up_to


class Experts:
    """The experts of one layer: the kernels that choose them and that do their work."""

    def __init__(
        self, layer: torch.nn.Module, moe: FusedMoEConfig, scheme: Scheme = NONE, **quantised: torch.Tensor | None
    ) -> None:
        """Choose the kernels. Raises ValueError for a wrong expert map.

        layer: vLLM's layer of experts, with its weights, which opset serves (`why_not`). moe: its configuration.
        scheme: how weights and activations are stored. quantised: the arguments of fused_experts that belong to it.
        """
        if layer.expert_map is not None:
            check_expert_map(layer.expert_map, layer.local_num_experts, f"{layer.layer_name}.expert_map")
        before = experts_of(layer)
        self._layer, self._prepared = layer, None
        self._held: dict[str, torch.Tensor] = {} if before is None else before._held
        # Also what these experts' predecessors lacked: one that was refused had it, and no graph knows that.
        self._lacked: set[str] = set()
        if before is not None:
            self._lacked = before._lacked | {name for name in before._arguments if not before.takes(name)}
        layer.opset_experts = self
        self._shapes, self._scheme = (layer.w13_weight.shape, layer.w2_weight.shape), scheme
        self._hidden_size = values_shape(layer.w13_weight)[-1]
        self.dtype, self.logits_dtype = moe.in_dtype, moe.router_logits_dtype or moe.in_dtype
        groups = _groups(layer, layer.global_num_experts)
        routed = {
            "num_experts": layer.global_num_experts,
            "top_k": layer.top_k,
            "scoring_func": layer.scoring_func,
            "bias": layer.e_score_correction_bias is not None,
            "num_expert_group": groups[0],
            "topk_group": groups[1],
        }
        self._sizes = sizes_of(layer.w2_weight)
        self._route = Kernels(ops.route, lambda: routed, compiled=False)
        self._experts = Kernels(ops.fused_experts, lambda: {"scheme": scheme, **self._sizes}, compiled=False)
        # Chosen now, so that the report at start-up names them.
        self._route[self.logits_dtype]
        self._experts[self.dtype]
        self._arguments = {
            "activation": layer.activation.value,
            "w1_bias": getattr(layer, "w13_bias", None),
            "w2_bias": getattr(layer, "w2_bias", None),
            "expert_map": layer.expert_map,
            "apply_router_weight_on_input": layer.apply_router_weight_on_input,
            "swiglu_limit": layer.swiglu_limit,
            "swiglu_alpha": layer.swiglu_alpha,
            "swiglu_beta": layer.swiglu_beta,
            **quantised,
        }

    @property
    def kind(self) -> tuple:
        """What layers have in common that launch the same kernels."""
        return *self._shapes, self._scheme

    def __call__(self, x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        # vLLM's parameters are subclasses of Tensor: PyTorch would dispatch every call through __torch_function__.
        with DisableTorchFunctionSubclass():
            weights, ids = self._choose(x, router_logits)
            return self._experts[x.dtype](x, *self._weights(), weights, ids, **self._arguments)

    def takes(self, name: str) -> bool:
        """Whether the kernel is given this argument."""
        return self._arguments[name] is not None

    def prepare(self) -> dict[str, torch.Tensor]:
        """Give the kernel the weights and scales in its own form, and free weights that are not needed any more.

        If weights were loaded again, the memory that the layer's experts held before takes the new values. Raises
        ValueError if it cannot.

        Returns what the kernel gets, by the names of its arguments.
        """
        problem = FusedExpertsProblem(current_platform.device_type, self.dtype, self._scheme, **self._sizes)
        kernel, prepared = selection.select(ops.fused_experts, problem).kernel, ops.fused_experts.prepared
        given = {"w1": self._layer.w13_weight.data, "w2": self._layer.w2_weight.data}
        given |= {name: value for name, value in self._arguments.items() if name in prepared}
        ready = {
            name: kernel.prepared(name, value, **{other: given[other] for other in given if other != name})
            for name, value in given.items()
        }
        packs = any(ready[name] is not given[name] for name in ("w1", "w2"))
        ready = {name: self._hold(name, value) for name, value in ready.items() if packs or name not in ("w1", "w2")}
        others = {name: self._hold(name, value) for name, value in self._arguments.items() if name not in ready}
        self._arguments |= others | {name: value for name, value in ready.items() if name in self._arguments}
        if packs:
            self._prepared = ready["w1"], ready["w2"]
            for weight in (self._layer.w13_weight, self._layer.w2_weight):
                weight.data = weight.data.new_empty(0)
        return ready

    def _hold(self, name: str, value: object) -> object:
        """An argument of the kernel, in the memory that it had before if it is a tensor; see `reloading`.

        Raises ValueError for another layout of the same shape, and for an argument that the kernel did not have before:
        captured graphs have the kernel for what was before.
        """
        if isinstance(value, torch.Tensor):
            old = self._held.get(name)
            relaid = old is not None and old.shape == value.shape and old.stride() != value.stride()
            if relaid or name in self._lacked:
                raise ValueError(
                    f"{self._layer.layer_name} needs another kernel for its new {name}: start the engine again"
                )
            value = self._held[name] = refilled(old, value)
        return value

    def make_room(self) -> None:
        """Let the layer have its own weights again, not filled, so that vLLM can load them.

        The prepared ones go before. Only kernels for a CPU prepare weights, and a CPU has no graphs that read them.
        """
        if self._prepared is not None:
            layer, self._prepared = self._layer, None
            for name in ("w1", "w2"):
                del self._held[name]
            for weight, shape in zip((layer.w13_weight, layer.w2_weight), self._shapes, strict=True):
                weight.data = weight.new_empty(shape)

    def warm_up(self, num_tokens: int) -> None:
        """Serve that many tokens, so that all kernels are compiled."""
        x = self._layer.w13_weight.new_zeros((num_tokens, self._hidden_size), dtype=self.dtype)
        self(x, x.new_zeros((num_tokens, self._layer.global_num_experts), dtype=self.logits_dtype))

    def _weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._prepared or (self._layer.w13_weight, self._layer.w2_weight)

    def _choose(self, x: torch.Tensor, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token and their weights. A model's own function for this is the model's code."""
        layer = self._layer
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


class MonolithicMethod:
    """A mixin that comes before a method of vLLM's among the bases. The layer's `Experts` then serve the layer."""

    is_monolithic = True

    def apply_monolithic(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return layer.opset_experts(x, router_logits)


class ExpertsMethod(MonolithicMethod, UnquantizedFusedMoEMethod):
    """The method of one layer's experts. The weights stay as they are, and are looked up at every call."""

    def create_weights(self, layer: torch.nn.Module, *args, **kwargs) -> None:
        super().create_weights(layer, *args, **kwargs)
        watch(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Raises ValueError, with its name, for a tensor that the checkpoint lacks."""
        check_experts(layer)
        super().process_weights_after_loading(layer)
        self.choose(layer)

    def choose(self, layer: torch.nn.Module) -> None:
        """Choose the kernels for weights that are ready."""
        Experts(layer, self.moe)


def _groups(layer: torch.nn.Module, num_experts: int) -> tuple[int, int]:
    """The number of groups, and of those that compete. As in vLLM, experts that make no groups all compete."""
    groups = layer.num_expert_group
    if not layer.use_grouped_topk or num_experts <= groups or num_experts % groups:
        return 1, 1
    return groups, layer.topk_group


def why_not(layer: torch.nn.Module) -> str | None:
    """What the contracts do not express of a layer's experts; None if they express all."""
    if getattr(layer.moe_config, "require_decomposed_backend", False):  # from vLLM 0.33 on
        return "experts that stand in for others"
    if layer.custom_routing_function is None and layer.scoring_func not in SCORING_FUNCS:
        return f"the scores {layer.scoring_func}"
    try:
        _activations.find(layer.activation.value, layer.swiglu_limit, layer.swiglu_alpha, layer.swiglu_beta)
    except ValueError as error:
        return f"this activation ({error})"
    return None


def check_served(layer: torch.nn.Module) -> None:
    """Raise Refusal for experts that the contracts do not express. The layer may be without weights."""
    if reason := why_not(layer):
        raise refusal(f"{reason} in {layer.layer_name}", ANOTHER_MODEL)


def multiply(model: torch.nn.Module, most_tokens: int) -> None:
    """Call a layer of each shape with 1, 2, 4 … and the most tokens, so that all of its kernels are compiled.

    Each kernel's launches change at numbers of tokens that are at least a factor of two apart, so these reach them all.
    """
    kinds = {experts.kind: experts for experts in map(experts_of, model.modules()) if experts is not None}
    for experts in kinds.values():
        for num_tokens in powers_up_to(most_tokens):
            experts.warm_up(num_tokens)


def call_directly(model: torch.nn.Module) -> None:
    """Let layers of experts call their function instead of the operator of it, as vLLM does on its own CPU platform.

    Only a compiler needs the operator, and PyTorch's dispatcher takes some 50 µs for each layer.
    """
    operators = torch.ops.vllm
    functions = {
        operators.moe_forward: moe_runner._moe_forward,
        operators.moe_forward_shared: moe_runner._moe_forward_shared,
    }
    for layer in model.modules():
        if isinstance(layer, moe_runner.MoERunner):
            layer._forward_entry = functions.get(layer._forward_entry, layer._forward_entry)


def experts_of(layer: torch.nn.Module) -> Experts | None:
    """The experts that serve a layer of vLLM; None for other layers. vLLM may replace the layer's method."""
    return getattr(layer, "opset_experts", None)


def register() -> None:
    """Register the method with vLLM, once in a process, whose engines may come one after the other."""
    name = UnquantizedFusedMoEMethod.name
    if UnquantizedFusedMoEMethod.__name__ in op_registry_oot:
        return
    UnquantizedFusedMoEMethod.register_oot(ExpertsMethod)
    # register_oot has set the name to that of our class. Users switch the op on and off by the original name.
    ExpertsMethod.name = name
