"""Makes Triton's interpreter compute as a GPU does, so that kernels need no branch for it.

Triton 3.6 and 3.7 convert between float formats there by truncation instead of rounding to nearest even, multiply the
bit patterns of bfloat16 matrices as integers, and round the product of a fused multiply-add. Each patch says how it can
be told that Triton no longer needs it.
"""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from vllm_opset.ops import _samples

_TORCH = {
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}


def patch() -> None:
    """Installs the patches. Once is enough."""
    interpreter._convert_float = _convert_float
    interpreter.InterpreterBuilder.create_dot = _create_dot
    interpreter.InterpreterBuilder.create_fma = _create_fma
    _samples.DRAWS = 16  # a launch takes as long as ten thousand on a GPU


def _convert_float(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding_mode) -> np.ndarray:
    """The bits of `data` in the target's format, rounded to nearest even. Not needed once fp32 1 + 2⁻⁸ + 2⁻⁹ is
    converted to the bfloat16 1 + 2⁻⁷.
    """
    if rounding_mode is interpreter._ir.ROUNDING_MODE.RTZ:
        raise NotImplementedError("rounding towards zero in the interpreter")
    bits = np.ascontiguousarray(data).view(f"int{source.primitive_bitwidth}")
    converted = torch.from_numpy(bits).view(_TORCH[source]).to(_TORCH[target])
    width = target.primitive_bitwidth
    return converted.view(getattr(torch, f"int{width}")).numpy().view(f"uint{width}")


def _create_dot(builder, a, b, d, input_precision, max_num_imprecise_acc):
    """a @ b + d, in d's format. Not needed once the original gives 2 for a bfloat16 1 @ 2."""
    product = np.matmul(_values(a), _values(b), dtype=d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def _create_fma(builder, x, y, z):
    """x · y + z, rounded once. Not needed once the original gives 2⁻⁴⁶ for an fp32 (1 + 2⁻²³)² − (1 + 2⁻²²)."""
    wide = x.data.astype(np.float64) * y.data + z.data
    return interpreter.TensorHandle(wide.astype(z.data.dtype), z.dtype.scalar)


def _values(operand) -> np.ndarray:
    source = operand.dtype.scalar
    if source in (tl.bfloat16, tl.float8e4nv, tl.float8e5):  # numpy has no such type: they are kept as bits
        return _convert_float(operand.data, source, tl.float32, None).view(np.float32)
    return operand.data
