"""Makes Triton's interpreter compute like a GPU, so that kernels need no branch for the interpreter.

The interpreter of Triton 3.6 and 3.7 converts between float formats by truncation instead of rounding to nearest even.
It multiplies the bit patterns of bfloat16 matrices as integers, and has no dot_scaled. It rounds the product of a fused
multiply-add. It calls the function of a reduction once for each element. Triton 3.9 has the same faults. It also makes
integers of a comparison of scalars, which it refuses as a mask. Each patch states a test for a Triton that no longer
needs it.

Three more save most of the interpreter's time: it patches the language once a launch, knows NumPy's dtypes, and does
not compute sums of integers again in 64 bits to find overflows. Samples are too small for one.
"""

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from vllm_opset.ops import _samples
from vllm_opset.ops.schemes import dequantise

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
    interpreter.InterpreterBuilder.create_dot_scaled = _create_dot_scaled
    interpreter.InterpreterBuilder.create_fma = _create_fma
    interpreter.InterpreterBuilder.create_splat = _create_splat
    interpreter.ReduceOps.generic_reduce = _generic_reduce
    interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _samples.DRAWS = 16  # a launch takes as long as ten thousand on a GPU


def _once_a_launch(patch_lang: Callable) -> Callable:
    """Patches the language's modules that a function sees, unless the launch or a function before it has.

    Not needed once a function that a kernel calls takes no more milliseconds than its operations.
    """

    def patch_rest(fn: Callable):
        seen = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        is_patched = not any(tl.core.is_builtin(module.load) for module in seen)
        return SimpleNamespace(restore=lambda: None) if is_patched else patch_lang(fn)

    return patch_rest


def _remembered(np_dtype_of: Callable) -> Callable:
    """NumPy's dtype for one of Triton. Not needed once the original does not make a dict of all of them."""
    of_scalar = functools.cache(np_dtype_of)

    def of(dtype: tl.dtype) -> np.dtype:
        return np_dtype_of(dtype) if isinstance(dtype.scalar, tl.pointer_type) else of_scalar(dtype.scalar)

    return of


def _convert_float(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding_mode) -> np.ndarray:
    """The bits of `data` in the target's format, rounded to nearest even.

    Not needed once the original converts fp32 1 + 2⁻⁸ + 2⁻⁹ to the bfloat16 1 + 2⁻⁷.
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


def _create_dot_scaled(
    builder, a, a_scale, a_format, b, b_scale, b_format, fast_math, a_packed, b_packed, d
) -> interpreter.TensorHandle:
    """a times MXFP4 b, + d, in fp32. Not needed once the original has dot_scaled."""
    packed, scale = (torch.from_numpy(np.ascontiguousarray(data)) for data in (b.data.T.view(np.uint8), b_scale.data))
    product = np.matmul(_values(a), dequantise(packed, scale.view(torch.uint8), torch.float32).numpy().T)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def _create_fma(builder, x, y, z):
    """x · y + z, rounded once. Not needed once the original gives 2⁻⁴⁶ for an fp32 (1 + 2⁻²³)² − (1 + 2⁻²²)."""
    wide = x.data.astype(np.float64) * y.data + z.data
    return interpreter.TensorHandle(wide.astype(z.data.dtype), z.dtype.scalar)


def _create_splat(builder, block: tl.block_type, scalar):
    """A block of one scalar. Not needed once the original gives a boolean array for the comparison of two integers."""
    array = np.full(block.shape, scalar.data.item(), scalar.data.dtype)
    return interpreter.TensorHandle(array, scalar.dtype.scalar)


def _generic_reduce(reduction, tensors) -> list:
    """A reduction by a function of the kernel. It combines halves until one element is left, as on a GPU.

    Not needed once a reduction of 4,096 elements takes less than a second.
    """
    flat = reduction.axis is None
    axis = 0 if flat else reduction.axis
    arrays = [tensor.handle.data.flatten() if flat else tensor.handle.data for tensor in tensors]
    dtypes = [tensor.dtype for tensor in tensors]
    while (size := arrays[0].shape[axis]) > 1:
        halves = [np.split(array, [size // 2], axis) for array in arrays]
        operands = [map(reduction.to_tensor, half, dtypes) for half in zip(*halves, strict=True)]
        combined = reduction.combine_fn.fn(*(tensor for half in operands for tensor in half))
        arrays = [tensor.handle.data for tensor in (combined if isinstance(combined, tuple) else (combined,))]
    if not reduction.keep_dims:
        arrays = [array.item() if flat else array.squeeze(axis) for array in arrays]
    return [reduction.to_tensor(array, dtype) for array, dtype in zip(arrays, dtypes, strict=True)]


def _values(operand) -> np.ndarray:
    source = operand.dtype.scalar
    if source in (tl.bfloat16, tl.float8e4nv, tl.float8e5):  # NumPy lacks these types: they are kept as bits
        return _convert_float(operand.data, source, tl.float32, None).view(np.float32)
    return operand.data
