"""vLLM's compiled CUDA ops (`torch.ops._C`), from a stock vLLM wheel.

Weights in fp8 are multiplied by CUTLASS, and those in int4 by Machete or Marlin, as vLLM chooses.
"""

import importlib
import importlib.util

import torch

from vllm_opset.bench.peers._vllm_int4 import Int4Weight
from vllm_opset.ops.gemm._quantised import BLOCK, TOKEN_BLOCK
from vllm_opset.ops.schemes import FP8, PACKED, PER_ROW, GroupShape

LIBRARIES = ("vllm._C", "vllm._C_stable_libtorch")  # depending on the release, one may be missing


def unavailable(device: str) -> str | None:
    """Why they are missing: they are CUDA kernels, and only in a wheel that was built with them."""
    if device != "cuda":
        return "vLLM's compiled ops are CUDA kernels"
    if not importlib.util.find_spec("vllm"):
        return "vLLM is not installed"
    for library in LIBRARIES:
        if importlib.util.find_spec(library):
            importlib.import_module(library)
    return None if hasattr(torch.ops._C, "rms_norm") else "this vLLM was built without compiled ops"


def rms_norm(x, weight, epsilon, weight_offset=0.0):
    _refuse("weight_offset", weight_offset)
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, epsilon)
    return out


def fused_add_rms_norm(x, residual, weight, epsilon, weight_offset=0.0):
    _refuse("weight_offset", weight_offset)
    torch.ops._C.fused_add_rms_norm(x, residual, weight, epsilon)


def quantise(x, to_dtype, group_shape, scale=None):
    _refuse("another dtype than fp8", to_dtype is not FP8)
    values, scales = _quantised(x, x.shape[1], to_dtype, group_shape)
    if scale is not None:
        torch.ops._C.static_scaled_fp8_quant(values, x, scale)
    elif group_shape == [1, -1]:
        torch.ops._C.dynamic_per_token_scaled_fp8_quant(values, x, scales, None)
    else:
        largest = torch.finfo(to_dtype).max
        torch.ops._C.per_token_group_fp8_quant(
            x, values, scales, group_shape[1], 1e-10, -largest, largest, False, False, False
        )
    return values, scales if scale is None else scale


def rms_norm_quant(x, weight, epsilon, to_dtype, group_shape, scale=None, weight_offset=0.0, out=None):
    if scale is None:
        return _rms_norm_quant(x, None, weight, epsilon, to_dtype, group_shape, weight_offset, out)
    _refuse("out", out is not None)
    values, _ = _quantised(x, x.shape[1], to_dtype, group_shape)
    torch.ops._C.rms_norm_static_fp8_quant(values, x, weight, scale, epsilon)
    return values, scale


def fused_add_rms_norm_quant(
    x, residual, weight, epsilon, to_dtype, group_shape, scale=None, weight_offset=0.0, out=None
):
    if scale is None:
        return _rms_norm_quant(x, residual, weight, epsilon, to_dtype, group_shape, weight_offset, out)
    _refuse("out", out is not None)
    values, _ = _quantised(x, x.shape[1], to_dtype, group_shape)
    torch.ops._C.fused_add_rms_norm_static_fp8_quant(values, x, residual, weight, scale, epsilon)
    return values, scale


def _rms_norm_quant(x, residual, weight, epsilon, to_dtype, group_shape, weight_offset, out):
    _refuse("weight_offset", weight_offset)
    _refuse("out", out is not None)
    values, scales = _quantised(x, x.shape[1], to_dtype, group_shape)
    if group_shape == [1, -1]:
        torch.ops._C.rms_norm_dynamic_per_token_quant(values, x, weight, scales, epsilon, None, residual)
    else:
        torch.ops._C.rms_norm_per_block_quant(values, x, weight, scales, epsilon, None, residual, group_shape[1], False)
    return values, scales


def silu_and_mul_quant(x, to_dtype, group_shape, scale=None, out=None):
    _refuse("out", out is not None)
    _refuse("scales of rows", group_shape == [1, -1])
    values, scales = _quantised(x, x.shape[1] // 2, to_dtype, group_shape)
    if scale is not None:
        torch.ops._C.silu_and_mul_quant(values, x, scale)
        return values, scale
    torch.ops._C.silu_and_mul_per_block_quant(values, x, scales, group_shape[1], None, False)
    return values, scales


def prepare_linear(x, weight, bias=None, weight_scale=None, x_scale=None, out_dtype=None, weight_zero_point=None):
    """An int4 weight as vLLM's kernel prepares it; the scales of fp8 as vLLM's quantisation writes them."""
    _refuse("weights without scales", weight_scale is None)
    if weight.dtype is PACKED:
        return (x, Int4Weight(weight, weight_scale, weight_zero_point, out_dtype), bias), {}
    _refuse("other weights than fp8 by fp8", weight.dtype is not FP8 or x_scale is None)
    shapes = {(BLOCK.scale_shape(weight.shape), TOKEN_BLOCK.scale_shape(x.shape)): True}
    shapes |= {(PER_ROW.scale_shape(weight.shape), PER_ROW.scale_shape(x.shape)): False}
    by_blocks = shapes.get((tuple(weight_scale.shape), tuple(x_scale.shape)))
    _refuse("scales of another granularity", by_blocks is None)
    if by_blocks:
        weight_scale, x_scale = weight_scale.t(), x_scale.t().contiguous().t()
    return (x, weight.t(), bias, weight_scale, x_scale, out_dtype), {}


def linear(x, weight, bias=None, weight_scale=None, x_scale=None, out_dtype=None, weight_zero_point=None):
    if isinstance(weight, Int4Weight):
        return weight.multiply(x, bias)
    out = torch.empty((len(x), weight.shape[1]), dtype=out_dtype, device=x.device)
    torch.ops._C.cutlass_scaled_mm(out, x, weight, x_scale, weight_scale, bias)
    return out


def silu_and_mul(x):
    return _halved(torch.ops._C.silu_and_mul, x)


def mul_and_silu(x):
    return _halved(torch.ops._C.mul_and_silu, x)


def gelu_and_mul(x, approximate="none"):
    return _halved({"none": torch.ops._C.gelu_and_mul, "tanh": torch.ops._C.gelu_tanh_and_mul}[approximate], x)


def swigluoai_and_mul(x, alpha=1.702, limit=7.0):
    return _halved(torch.ops._C.swigluoai_and_mul, x, alpha, limit)


def silu_and_mul_with_clamp(x, limit, alpha=1.0, beta=0.0):
    return _halved(torch.ops._C.silu_and_mul_with_clamp, x, limit, alpha, beta)


def gelu_new(x):
    return _elementwise(torch.ops._C.gelu_new, x)


def gelu_fast(x):
    return _elementwise(torch.ops._C.gelu_fast, x)


def quick_gelu(x):
    return _elementwise(torch.ops._C.gelu_quick, x)


def relu2(x):
    return _elementwise(torch.ops._C.relu_squared, x)


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox_style=True):
    torch.ops._C.rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox_style)


def reshape_and_cache(key, value, kv_cache, slot_mapping, k_scale=None, v_scale=None):
    _refuse("scales without an fp8 cache", k_scale is not None)
    key_cache, value_cache = kv_cache.transpose(1, 2).chunk(2, dim=-1)
    torch.ops._C_cache_ops.reshape_and_cache_flash(
        key, value, key_cache, value_cache, slot_mapping, "auto", _one(key), _one(key)
    )


def rope_cache(
    query, key, value, positions, cos_sin_cache, is_neox_style, kv_cache, slot_mapping, k_scale=None, v_scale=None
):
    """Run two ops. They rotate the key in place, which our contract forbids."""
    rotary_embedding(positions, query, key, key.shape[2], cos_sin_cache, is_neox_style)
    reshape_and_cache(key, value, kv_cache, slot_mapping, k_scale, v_scale)


def qk_norm_rope_cache(
    query, key, value, q_weight, k_weight, epsilon, positions, cos_sin_cache, is_neox_style, kv_cache, slot_mapping,
    k_scale=None, v_scale=None, weight_offset=0.0,
):  # fmt: skip
    """Run two ops. They change the key in place, which our contract forbids."""
    _refuse("weight_offset", weight_offset)
    (tokens, heads, head_size), kv_heads = query.shape, key.shape[1]
    qkv = query.as_strided(
        (tokens, (heads + 2 * kv_heads) * head_size), (query.stride(0), 1)
    )  # query, key and value lie in one projection's output
    torch.ops._C.fused_qk_norm_rope(
        qkv, heads, kv_heads, kv_heads, head_size, epsilon, q_weight, k_weight, cos_sin_cache, is_neox_style, positions
    )
    reshape_and_cache(key, value, kv_cache, slot_mapping, k_scale, v_scale)


def _halved(op, x, *parameters):
    out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
    op(out, x, *parameters)
    return out


def _elementwise(op, x):
    out = torch.empty_like(x)
    op(out, x)
    return out


def _quantised(x, columns, to_dtype, group_shape):
    values = torch.empty((len(x), columns), dtype=to_dtype, device=x.device)
    scales = GroupShape(*group_shape).scale_shape(values.shape)
    return values, torch.empty(scales, dtype=torch.float32, device=x.device)


def _one(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(1, dtype=torch.float32, device=like.device)  # a scale that the op does not read


def _refuse(what: str, asked) -> None:
    if asked:
        raise NotImplementedError(f"vLLM's compiled op cannot do it: {what}")
