"""rotary_embedding by npu_mrope, or by npu_rotary_mul or ATB's _npu_rotary_embedding.

"ascend": docs of npu_mrope, on positions of one axis: both styles, also of a part of a head, whose width is a multiple
of 32 in 16 bits and of 16 in fp32 (CANN: so is the head size). A position beyond the table is an error there.
"ascend_rotary_mul", for other widths: docs of npu_rotary_mul: even heads of up to 894, rotated whole; cosines and
sines a head wide, laid out as BSND. They say that these are within [−1, 1], which YaRN's are not quite.
"ascend_atb", where an override names it: not in docs; vllm-ascend calls it so, for whole heads in 16 bits.

Query, key and table are of one dtype for each, so a table in fp32 has all of it computed in fp32. Not documented: in
what precision the operators compute; the contract wants fp32.
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
def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox_style=True, inplace=True):
    def rotate(rows, table):
        # It wants a key: where there is none, one head of zeros.
        both = rows if len(rows) == 2 else [*rows, rows[0].new_zeros(len(positions), head_size)]
        mode = "half" if is_neox_style else _constraints.INTERLEAVED
        return npu.npu_mrope(
            positions, *both, table, head_size, mrope_section=[0, 0, 0], rotary_mode=mode, cache_mode="default"
        )

    return _apply(rotate, positions, query, key, head_size, cos_sin_cache, inplace)


def supports_rotary_mul(problem: RotaryProblem) -> str | None:
    """fp32, bf16 and fp16 on A2 and A3; whole heads of up to 894."""
    widths = _constraints.rotary_mul(problem.head_size, problem.rotary_dim)
    return widths or _constraints.refused("npu_rotary_mul", problem)


@kernel(ops.rotary_embedding, name="ascend_rotary_mul", supports=supports_rotary_mul)
def rotary_mul(positions, query, key, head_size, cos_sin_cache, is_neox_style=True, inplace=True):
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

    return _apply(rotate, positions, query, key, head_size, cos_sin_cache, inplace)


def supports_atb(problem: RotaryProblem) -> str | None:
    """bf16 and fp16, the table in the same, on A2 and A3; whole heads."""
    if problem.table_dtype not in (None, problem.dtype):
        return f"_npu_rotary_embedding wants the table in {_constraints.names([problem.dtype])} as well"
    widths = _constraints.full_width(problem.head_size, problem.rotary_dim)
    return widths or _constraints.refused("_npu_rotary_embedding", problem, "atb")


@kernel(ops.rotary_embedding, name="ascend_atb", supports=supports_atb)
def rotary_embedding_atb(positions, query, key, head_size, cos_sin_cache, is_neox_style=True, inplace=True):
    def rotate(rows, table):
        # In place, so on copies: contiguous rows may be the caller's own.
        query, *keys = (x.clone() for x in rows)
        key = keys[0] if keys else query.new_zeros(len(positions), head_size)
        atb._npu_rotary_embedding(positions, query, key, head_size, table, is_neox_style)
        return query, key

    return _apply(rotate, positions, query, key, head_size, cos_sin_cache, inplace)


def _apply(rotate, positions, query, key, head_size, cos_sin_cache, inplace):
    """Runs an operator as the contract has it.

    rotate: takes query, and key if there is one, as rows [T, H * head_size], and the table, all contiguous and of one
    dtype, and returns them rotated.
    """
    check_arguments(positions, query, key, head_size, cos_sin_cache)
    given = [x for x in (query, key) if x is not None]
    dtype = torch.promote_types(query.dtype, cos_sin_cache.dtype)
    rows = [x.reshape(len(x), x.shape[1:].numel()).to(dtype).contiguous() for x in given]
    rotated = rotate(rows, cos_sin_cache.to(dtype).contiguous()) if len(positions) else [row.clone() for row in rows]
    results = []
    for x, new in zip(given, rotated, strict=False):
        new = new.reshape(x.shape)
        results.append(x.copy_(new) if inplace else new.to(x.dtype).contiguous())
    return results[0], results[1] if key is not None else None
