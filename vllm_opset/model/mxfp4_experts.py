"""vLLM's experts with MXFP4 weights, as gpt-oss has them, by ops.route and ops.fused_experts.

vLLM's own method chooses among backends that need compiled kernels or other platforms, so the configuration here gives
the experts another one. On stock vLLM, they get it by `replaced_methods`. vLLM loads the packed weights; everything but
the experts is unquantised.
"""

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config, GptOssMxfp4MoEMethod

from vllm_opset.model.experts import Experts, MonolithicMethod
from vllm_opset.model.loading import check_columns, pop_loaded, watch
from vllm_opset.ops.schemes import MXFP4, NO_SCALE, Scheme, check_scale, values_shape

# vLLM's names of the parameters, and those of the checkpoint.
STORED = {
    f"{weight}_{parameter}": f"{of_checkpoint}_{kind}"
    for weight, of_checkpoint in (("w13", "gate_up_proj"), ("w2", "down_proj"))
    for parameter, kind in (("weight", "blocks"), ("weight_scale", "scales"), ("bias", "bias"))
}
UNQUANTISED = {name: stored.removesuffix("_blocks") for name, stored in STORED.items()}  # those of unquantised ones
SCALES = ("w13_weight_scale", "w2_weight_scale")


class OpsetMxfp4ExpertsMethod(MonolithicMethod, GptOssMxfp4MoEMethod):
    """The method of one layer's experts. vLLM's class creates the weights; nothing else of it is used.

    The worker calls `bind` once the model's weights are loaded.
    """

    multiple = MXFP4.group.columns  # of which the number of columns is a multiple

    def __init__(self, moe: FusedMoEConfig) -> None:
        FusedMoEMethodBase.__init__(self, moe)  # the parent would ask for one of its backends
        self.weight_dtype = GptOssMxfp4Config.get_name()  # by which the model knows how to load the weights
        self.mxfp4_backend = Mxfp4MoeBackend.NONE

    def maybe_roundup_sizes(self, *args, **kwargs) -> tuple[int, int]:
        return FusedMoEMethodBase.maybe_roundup_sizes(self, *args, **kwargs)

    def create_weights(self, layer: RoutedExperts, *args, **kwargs) -> None:
        """Raises Refusal for weights whose rows are no whole groups of one scale."""
        super().create_weights(layer, *args, **kwargs)
        for size, workers in ((self.hidden_size, 1), (self.intermediate_size, self.moe.tp_size)):
            check_columns(layer, "MXFP4 weights", size, self.multiple, workers)
        watch(layer)
        if get_current_vllm_config().load_config.load_format != "dummy":
            for name in SCALES:
                getattr(layer, name).data.fill_(NO_SCALE)  # stays where the checkpoint lacks one

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Raise ValueError, with its name, for a tensor that the checkpoint lacks.

        Nothing is converted: when vLLM loads weights again, it copies what is here now into the weights that are bound.
        """
        for name, parts in pop_loaded(layer).items():
            if not parts:
                raise ValueError(f"{named(layer, name)} is missing in the checkpoint")

    def bind(self, layer: RoutedExperts) -> None:
        """Choose the kernels and prepare the weights. Raises ValueError for a damaged scale, by its name."""
        for name in SCALES:
            weight, scale = getattr(layer, name.removesuffix("_scale")), getattr(layer, name)
            numbers = scale.data.view(torch.float8_e8m0fnu).float()
            check_scale(named(layer, name), numbers, values_shape(weight), MXFP4.group)
        for bias in (layer.w13_bias, layer.w2_bias):
            bias.data = bias.data.to(self.moe.in_dtype)
        scales = {"w1_scale": layer.w13_weight_scale.data, "w2_scale": layer.w2_weight_scale.data}
        prepared = Experts(layer, self.moe, Scheme(MXFP4), **scales, out_dtype=self.moe.in_dtype).prepare()
        layer.w13_weight_scale.data, layer.w2_weight_scale.data = prepared["w1_scale"], prepared["w2_scale"]

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """None: no kernel of vLLM's runs."""


class OpsetMxfp4Config(GptOssMxfp4Config):
    """gpt-oss's configuration of vLLM, whose experts have opset's method."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Those that hold every value of MXFP4. A platform may take fewer."""
        return [torch.bfloat16, torch.float32]

    def get_quant_method(self, layer: torch.nn.Module, prefix: str):
        if isinstance(layer, RoutedExperts):
            return OpsetMxfp4ExpertsMethod(layer.moe_config)
        return super().get_quant_method(layer, prefix)


def named(layer: RoutedExperts, name: str) -> str:
    """A tensor of a layer, by the name of its parameter, and by that in the checkpoint."""
    stored = STORED[name] if isinstance(layer.quant_method, OpsetMxfp4ExpertsMethod) else UNQUANTISED[name]
    return f"{layer.layer_name}.{name} ({stored} in the checkpoint)"
