"""opset's methods for experts with int4 and MXFP4 weights, in place of stock vLLM's while a model is built.

vLLM's methods store these weights for their own kernels once they are loaded. So opset's methods load them instead, if
opset serves the layer. Experts whose weights stay as they are loaded get opset's kernels later (`bound_experts`).
"""

from collections.abc import Callable

import torch
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

from vllm_opset.model.experts import why_not
from vllm_opset.model.int4_experts import OpsetAwqExpertsMethod, OpsetCompressedExpertsMethod, OpsetGptqExpertsMethod
from vllm_opset.model.mxfp4_experts import OpsetMxfp4ExpertsMethod


def _of_compressed_tensors(method: FusedMoEMethodBase) -> FusedMoEMethodBase:
    return OpsetCompressedExpertsMethod(method.weight_quant, method.input_quant, method.moe)


# Makes opset's method from vLLM's, by the name of vLLM's class.
REPLACED: dict[str, Callable[[FusedMoEMethodBase], FusedMoEMethodBase]] = {
    "AutoAWQMoEMethod": lambda method: OpsetAwqExpertsMethod(method.quant_config, method.moe),
    "AutoGPTQMoEMethod": lambda method: OpsetGptqExpertsMethod(method.quant_config, method.moe),
    "CompressedTensorsWNA16MoEMethod": _of_compressed_tensors,
    "CompressedTensorsWNA16MarlinMoEMethod": _of_compressed_tensors,  # of vLLM 0.26
    "GptOssMxfp4MoEMethod": lambda method: OpsetMxfp4ExpertsMethod(method.moe),
}


def replaced(layer: torch.nn.Module, method: FusedMoEMethodBase) -> FusedMoEMethodBase:
    """The method that serves a layer of experts for which vLLM has chosen `method`."""
    make = REPLACED.get(type(method).__name__)
    if make is None or why_not(layer):
        return method
    own, moe = make(method), method.moe
    sizes = moe.hidden_dim, moe.intermediate_size_per_partition
    has_unserved_bias = moe.has_bias and not isinstance(own, OpsetMxfp4ExpertsMethod)
    return method if has_unserved_bias or any(size % own.multiple for size in sizes) else own
