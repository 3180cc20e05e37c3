"""opset as a provider of vLLM's IR ops, for code that calls these ops without a layer.

RMSNorm layers do not use these ops: `layers` replaces them. vLLM removes its IR after 0.33, and this file goes with it.
"""

import functools

from torch import Tensor

from vllm_opset import ops, selection

PROVIDER = "opset"


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    return selection.select(ops.rms_norm, ops.rms_norm.problem_for(x, weight, epsilon)).run(x, weight, epsilon)


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    op = ops.fused_add_rms_norm
    selection.select(op, op.problem_for(x, x_residual, weight, epsilon)).run(x, x_residual, weight, epsilon)
    return x, x_residual


def _whole_row(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return variance_size is None and x.device.type in selection.PREFERENCE


def _whole_row_with_residual(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _whole_row(x, weight, epsilon, variance_size)


@functools.cache
def register() -> None:
    """Register the provider, once in a process."""
    from vllm import ir

    ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_whole_row)(rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_whole_row_with_residual, inplace=True)(
        fused_add_rms_norm
    )


def priority():
    """The priority of IR op providers: opset first for the norms, vLLM's own code for every other IR op."""
    from vllm.config.kernel import IrOpPriorityConfig

    norms = {name: [PROVIDER, "native"] for name in ("rms_norm", "fused_add_rms_norm")}
    return IrOpPriorityConfig.with_default(["native"], **norms)
