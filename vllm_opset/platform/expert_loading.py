"""The patches that have vLLM refuse experts that opset does not serve, and name a tensor of experts that does not fit.

And the refusal to load gpt-oss again.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from vllm_opset.platform.bridges import EVERY, WITHOUT_KERNELS, find, has, patch, uses, wrap_once
from vllm_opset.unsupported import Refusal

if TYPE_CHECKING:
    from vllm.config import ModelConfig

ROUTED_EXPERTS = "vllm.model_executor.layers.fused_moe.routed_experts.RoutedExperts"
GPT_OSS = "vllm.model_executor.models.gpt_oss.GptOssModel"
# Whether vLLM copies gpt-oss's sinks past their loaders, as it copies unquantised experts (up to 0.32).
copies_sinks = uses(f"{GPT_OSS}._load_weights_mxfp4", "sinks")


def check_shapes(model: "ModelConfig") -> None:
    """Have the shapes of experts' tensors checked, before a model with experts is built."""
    check_shapes_of_experts()
    if is_loaded_as_gpt_oss(model):
        check_shapes_of_gpt_oss()


def is_loaded_as_gpt_oss(model: "ModelConfig") -> bool:
    """Whether a model is gpt-oss, or one that is loaded as it is."""
    return any(name.startswith(("GptOss", "OpenAIPrivacyFilter")) for name in model.architectures)


def check_reload(model: "ModelConfig") -> None:
    """Raise Refusal for a model of which vLLM would load a part again. Call it before vLLM begins to.

    vLLM loads weights again by the loaders of their parameters. A tensor that the model copies without a loader keeps
    its old values, and no error is raised.
    """
    if not is_loaded_as_gpt_oss(model):
        return
    stays = [*(["experts"] if model.quantization is None else []), *(["sinks"] if copies_sinks() else [])]
    if stays:
        raise Refusal(
            f"vllm-opset does not support loading gpt-oss's weights again, because vLLM would keep the old "
            f"{' and '.join(stays)}: start a new engine."
        )


@patch(
    has(f"{ROUTED_EXPERTS}._get_quant_method"),
    ends="vLLM asks its platform about a layer of experts before it creates the weights",
    changes=(f"{ROUTED_EXPERTS}._get_quant_method",),
    worker=WITHOUT_KERNELS,
)
def refuse_unserved_experts() -> None:
    """Refuse experts whose choice or activation opset does not have, before their weights are created and loaded.

    vLLM's choice of a method for the weights asks its own backends alone.
    """
    wrap_once(find(ROUTED_EXPERTS), "_get_quant_method", _checking_served)


def _checking_served(choose: Callable) -> Callable:
    from vllm_opset.model.experts import check_served

    def _get_quant_method(self, *args, **kwargs):
        check_served(self)
        return choose(self, *args, **kwargs)

    return _get_quant_method


@patch(
    has(f"{ROUTED_EXPERTS}.weight_loader"),
    ends="vLLM raises for weights of experts that do not fit, and names them",
    changes=(f"{ROUTED_EXPERTS}.weight_loader",),
    worker=EVERY,
)
def check_shapes_of_experts() -> None:
    """Raise an error with a name for a tensor of experts whose shape does not fit.

    vLLM takes one that is too small, and leaves the rest of the parameter as it was. With tensor parallelism, it may
    also take one that is too large. The engine then answers with wrong tokens. For other shapes, vLLM raises an error
    without a name.
    """
    # Imported late: vLLM's module of experts imports thousands of others.
    from vllm_opset.model.expert_shapes import checked

    wrap_once(find(ROUTED_EXPERTS), "weight_loader", checked)


@patch(
    has(f"{GPT_OSS}.load_weights"),
    ends="vLLM raises for weights of gpt-oss's experts that do not fit, and names them",
    changes=(f"{GPT_OSS}.load_weights",),
    worker=EVERY,
)
def check_shapes_of_gpt_oss() -> None:
    """Raise an error with a name for a tensor of gpt-oss's experts whose shape does not fit.

    vLLM cuts the part of a worker out of a tensor of any size. It then fills as much of the parameter as this part
    covers, or repeats it. The engine then answers with wrong tokens. Other shapes end in an error without a name.
    """
    wrap_once(find(GPT_OSS), "load_weights", _checking_gpt_oss)


def _checking_gpt_oss(load: Callable) -> Callable:
    from vllm_opset.model.gpt_oss_shapes import checked

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return load(self, checked(self, weights))

    return load_weights
