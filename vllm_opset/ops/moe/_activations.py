"""The activations of experts, by the names of vLLM's `MoEActivation`."""

import functools
from collections.abc import Mapping

from vllm_opset.ops.activation.gelu import gelu
from vllm_opset.ops.activation.gelu_and_mul import gelu_and_mul
from vllm_opset.ops.activation.gelu_tanh import gelu_tanh
from vllm_opset.ops.activation.relu2 import relu2
from vllm_opset.ops.activation.silu_and_mul import silu_and_mul
from vllm_opset.ops.activation.silu_and_mul_with_clamp import silu_and_mul_with_clamp
from vllm_opset.ops.activation.swigluoai_and_mul import swigluoai_and_mul
from vllm_opset.ops.activation.swiglustep_and_mul import swiglustep_and_mul
from vllm_opset.ops.contract import Op

WITHOUT_GATE = {"gelu_no_mul": gelu, "gelu_tanh_no_mul": gelu_tanh, "relu2_no_mul": relu2}
GATED = ("silu", "gelu", "gelu_tanh", "swigluoai", "swigluoai_uninterleave", "swiglustep")
NAMES = (*GATED, *WITHOUT_GATE)


@functools.cache
def find(
    activation: str, limit: float | None = None, alpha: float | None = None, beta: float | None = None
) -> tuple[Op, Mapping[str, float | str]]:
    """The op of an activation, and its keyword arguments.

    limit, alpha, beta: None for the defaults of the op. Raises ValueError for an unknown name, and for a parameter that
    the activation does not have.
    """
    given = {name: value for name, value in (("limit", limit), ("alpha", alpha), ("beta", beta)) if value is not None}
    if activation == "silu" and "limit" in given:
        activation = "swigluoai_uninterleave"
    known = {
        **{name: (op, {}, ()) for name, op in WITHOUT_GATE.items()},
        "silu": (silu_and_mul, {}, ()),
        "gelu": (gelu_and_mul, {}, ()),
        "gelu_tanh": (gelu_and_mul, {"approximate": "tanh"}, ()),
        "swigluoai": (swigluoai_and_mul, {}, ("limit", "alpha")),
        "swigluoai_uninterleave": (silu_and_mul_with_clamp, {}, ("limit", "alpha", "beta")),
        "swiglustep": (swiglustep_and_mul, {}, ("limit",)),
    }
    if activation not in known:
        raise ValueError(f"experts have no activation {activation!r}; known: {', '.join(known)}")
    op, fixed, takes = known[activation]
    if unknown := set(given) - set(takes):
        raise ValueError(f"the activation {activation} of experts takes no {', '.join(sorted(unknown))}")
    if op is silu_and_mul_with_clamp and "limit" not in given:
        raise ValueError(f"the activation {activation} of experts needs a limit")
    return op, {**fixed, **given}
