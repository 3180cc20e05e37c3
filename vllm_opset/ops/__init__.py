"""WHAT: one file per op, its contract. The reference in plain PyTorch is the contract's body; see `contract`."""

from vllm_opset.ops.contract import Op
from vllm_opset.ops.rms_norm import rms_norm
from vllm_opset.ops.silu_and_mul import silu_and_mul

ALL: tuple[Op, ...] = (
    rms_norm,
    silu_and_mul,
)
BY_NAME: dict[str, Op] = {op.name: op for op in ALL}
