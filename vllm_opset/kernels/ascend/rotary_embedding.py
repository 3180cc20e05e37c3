"""rotary_embedding by npu_mrope, or by npu_rotary_mul or ATB's _npu_rotary_embedding.

The kernel "ascend" uses npu_mrope with positions of one axis. Source: its docs. It rotates in both styles, and also a
part of a head. The rotated width is a multiple of 32 in 16 bits and of 16 in fp32 (CANN: the head size too). A position
beyond the table is an error.

The kernel "ascend_rotary_mul" uses npu_rotary_mul, for other widths. Source: its docs. It rotates whole heads of an
even width up to 894. Cosines and sines are as wide as a head and laid out as BSND. The docs say that they are within
[−1, 1], but YaRN's may slightly exceed this.

The kernel "ascend_atb" runs only if an override names it. Its operator is not in docs; vllm-ascend calls it like this,
for whole heads in 16 bits.

Each operator takes query, key and table in one dtype, so with a table in fp32 it computes everything in fp32. Not
documented: the precision in which the operators compute. The contract requires fp32.
"""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.ascend import _constraints
from vllm_opset.kernels.ascend._operators import atb, npu
from vllm_opset.ops.rope.rotary_embedding import RotaryProblem, check_arguments


def supports(problem: RotaryProblem) -> str | None:
    """fp32, bf16 and fp16 on A2 and A3; rotary widths and head sizes that are multiples of 32, in fp32 of 16."""
    dtype = torch.promote_types(problem.dtype, problem.table_dtype or problem.dtype)
    widths = _constraints.mrope(dtype, problem.head_size, problem.rotary_dim)
    return widths or _constraints.refused("npu_mrope", problem)


@kernel(ops.rotary_embedding, name="ascend", supports=supports)
def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox_style=True):
    def rotate(rows, table):
        # The operator needs a key. If there is none, it gets one head of zeros.
        both = rows if len(rows) == 2 else [*rows, rows[0].new_zeros(len(positions), head_size)]
        mode = "half" if is_neox_style else _constraints.INTERLEAVED
        return npu.npu_mrope(
            positions, *both, table, head_size, mrope_section=[0, 0, 0], rotary_mode=mode, cache_mode="default"
        )

    _apply(rotate, positions, query, key, head_size, cos_sin_cache)


def supports_rotary_mul(problem: RotaryProblem) -> str | None:
    """fp32, bf16 and fp16 on A2 and A3; whole heads of up to 894."""
    widths = _constraints.rotary_mul(problem.head_size, problem.rotary_dim)
    return widths or _constraints.refused("npu_rotary_mul", problem)


@kernel(ops.rotary_embedding, name="ascend_rotary_mul", supports=supports_rotary_mul)
def rotary_mul(positions, query, key, head_size, cos_sin_cache, is_neox_style=True):
    def rotate(rows, table):
        halves = table.index_select(0, positions).chunk(2, dim=-1)
        if is_neox_style:
            wide = [half.repeat(1, 2) for half in halves]
        else:
            wide = [half.repeat_interleave(2, dim=-1) for half in halves]
        cos, sin = (x.view(1, -1, 1, head_size) for x in wide)
        mode = "half" if is_neox_style else _constraints.INTERLEAVED
        heads = (x.view(1, len(x), -1, head_size) for x in rows)
        return [npu.npu_rotary_mul(x, cos, sin, rotary_mode=mode) for x in heads]

    _apply(rotate, positions, query, key, head_size, cos_sin_cache)


def supports_atb(problem: RotaryProblem) -> str | None:
    """bf16 and fp16, the table in the same, on A2 and A3; whole heads."""
    if problem.table_dtype not in (None, problem.dtype):
        return f"_npu_rotary_embedding wants the table in {_constraints.names([problem.dtype])} as well"
    widths = _constraints.full_width(problem.head_size, problem.rotary_dim)
    return widths or _constraints.refused("_npu_rotary_embedding", problem, "atb")


@kernel(ops.rotary_embedding, name="ascend_atb", supports=supports_atb)
def rotary_embedding_atb(positions, query, key, head_size, cos_sin_cache, is_neox_style=True):
    def rotate(rows, table):
        # The operator works in place. It gets copies, because contiguous rows may be the caller's own tensors.
        query, *keys = (x.clone() for x in rows)
        key = keys[0] if keys else query.new_zeros(len(positions), head_size)
        atb._npu_rotary_embedding(positions, query, key, head_size, table, is_neox_style)
        return query, key

    _apply(rotate, positions, query, key, head_size, cos_sin_cache)


def _apply(rotate, positions, query, key, head_size, cos_sin_cache):
    """Runs an operator in the way that the contract requires.

    rotate: takes query, and key if there is one, as rows [T, H * head_size], and the table. All are contiguous and have
    one dtype. Returns the rotated rows.
    """
    check_arguments(positions, query, key, head_size, cos_sin_cache)
    given = [x for x in (query, key) if x is not None]
    dtype = torch.promote_types(query.dtype, cos_sin_cache.dtype)
    rows = [x.reshape(len(x), x.shape[1:].numel()).to(dtype).contiguous() for x in given]
    rotated = rotate(rows, cos_sin_cache.to(dtype).contiguous()) if len(positions) else [row.clone() for row in rows]
    for x, new in zip(given, rotated, strict=False):
        x.copy_(new.reshape(x.shape))
