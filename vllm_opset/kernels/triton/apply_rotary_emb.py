"""apply_rotary_emb: a program rotates a group of one token's heads by the same angles."""

import torch
import triton
import triton.language as tl

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _launch, _supports
from vllm_opset.kernels.triton._heads import Shape, grouped, load_heads, rotated, store_pairs
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.ops.rope.apply_rotary_emb import check_arguments


@kernel(ops.apply_rotary_emb, name="triton", supports=_supports.floats)
def apply_rotary_emb(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox_style: bool = True) -> torch.Tensor:
    check_arguments(x, cos, sin)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    batch = x if x.dim() == 4 else x.unsqueeze(0)
    seqs, tokens, heads, head_size = batch.shape
    values = _launch.parameters("rotary_embedding", x.device, seqs * tokens)
    launch = grouped(batch[0], None, head_size, **values)
    _launch.launch(
        _apply_rotary_emb, (seqs * tokens * launch["GROUPS"],),
        batch, batch.stride(), cos, cos.stride(), sin, sin.stride(), out, tokens,
        SHAPE=Shape.of(head_size, head_size, is_neox_style), NUM_HEADS=heads, GROUPS=launch["GROUPS"],
        HEADS=launch["HEADS"], num_warps=launch["num_warps"], **_launch.launch_options(x.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens"])
def _apply_rotary_emb(
    x, x_strides, cos, cos_strides, sin, sin_strides, out, tokens,
    SHAPE: tl.constexpr, NUM_HEADS: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row = (tl.program_id(0) // GROUPS).to(tl.int64)
    head = tl.program_id(0) % GROUPS * HEADS + tl.arange(0, HEADS)[:, None]
    mask, token = head < NUM_HEADS, row % tokens
    x += row // tokens * x_strides[0] + token * x_strides[1] + head * x_strides[2]
    a, b, _ = load_heads(x, x_strides[3], mask, SHAPE)
    pair = tl.broadcast_to(tl.arange(0, SHAPE.pair_block)[None, :], [HEADS, SHAPE.pair_block])
    inside = mask & (pair < SHAPE.pairs)
    c = tl.load(cos + token * cos_strides[0] + pair * cos_strides[1], inside, 0.0).to(tl.float32)
    s = tl.load(sin + token * sin_strides[0] + pair * sin_strides[1], inside, 0.0).to(tl.float32)
    a, b = rotated(a, b, c, s)
    store_pairs(out + (row * NUM_HEADS + head) * 2 * SHAPE.pairs, 1, mask, a, b, SHAPE)
