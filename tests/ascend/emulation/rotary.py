"""Rotary embeddings: computed in fp32, rounded once."""

import torch

from emulation.registry import documented, emulates, refuse, require

# npu_mrope's documents name the second style of pairs by the first of these names; callers use the second name.
INTERLEAVED = ("interleave", "interleaved")


def swapped(x: torch.Tensor, half: bool) -> torch.Tensor:
    """The factor of the sines: each pair (a, b) becomes (−b, a)."""
    if half:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((-b, a), dim=-1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, half: bool) -> torch.Tensor:
    """Rotates x. cos and sin are as wide as x."""
    wide = x.float()
    return (wide * cos.float() + swapped(wide, half) * sin.float()).to(x.dtype)


def rows_of(table: torch.Tensor, positions: torch.Tensor, half: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [T, 1, rotary_dim] of tokens, from a table with one cosine and one sine for each pair."""
    cos, sin = table[positions.long()].unsqueeze(1).chunk(2, dim=-1)
    if half:
        return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
    return cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)


@emulates("npu::npu_rotary_mul")
def npu_rotary_mul(input, r1, r2, rotary_mode="half", rotate=None):
    if rotate is not None:
        raise NotImplementedError("a matrix in place of a mode is not emulated")
    require(rotary_mode in ("half", INTERLEAVED[0]), "rotary_mode is 'half' or 'interleave'")
    require(input.dim() == r1.dim() == r2.dim() == 4, "all are four-dimensional")
    refuse(documented.rotary_mul(input.shape[-1], r1.shape[-1]))
    require(input.shape[-1] % 2 == 0, "heads are even")
    require(input.shape[0] * input.shape[2] <= documented.ROTARY_MUL_MAX_HEADS, "less than 1000 heads, B * N in BSND")
    require(r1.shape == r2.shape, "r1 and r2 have one shape")
    require(all(r in (1, n) for r, n in zip(r1.shape, input.shape, strict=True)), "r1 broadcasts to input")
    return turned(input, r1, r2, rotary_mode == "half")


@emulates("npu::npu_mrope")
def npu_mrope(
    positions, query, key, cos_sin_cache, head_size, *, mrope_section=None, rotary_mode="half", cache_mode="default"
):
    """Returns new tensors. The part of a head beyond rotary_dim is copied."""
    if (mrope_section or [0, 0, 0]) != [0, 0, 0] or cache_mode != "default" or positions.dim() != 1:
        raise NotImplementedError("sections and an interleaved table are not emulated")
    require(rotary_mode in ("half", *INTERLEAVED), "rotary_mode is 'half' or 'interleave'")
    check_table(positions, query, key, cos_sin_cache, head_size)
    refuse(documented.mrope(query.dtype, head_size, cos_sin_cache.shape[1]))
    return tuple(through_table(x, positions, cos_sin_cache, head_size, rotary_mode == "half") for x in (query, key))


@emulates("atb::_npu_rotary_embedding")
def _npu_rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox_style):
    """Rotates whole heads in place."""
    check_table(positions, query, key, cos_sin_cache, head_size)
    refuse(documented.full_width(head_size, cos_sin_cache.shape[1]))
    refuse(documented.contiguous(positions=positions, query=query, key=key, cos_sin_cache=cos_sin_cache))
    for x in (query, key):
        x.copy_(through_table(x, positions, cos_sin_cache, head_size, is_neox_style))


def check_table(positions, query, key, table, head_size) -> None:
    require(query.dim() == key.dim() == table.dim() == 2, "query, key and cos_sin_cache are two-dimensional")
    require(query.dtype == key.dtype == table.dtype, "query, key and cos_sin_cache have one dtype")
    require(positions.dtype in (torch.int32, torch.int64), "positions are int32 or int64")
    require(bool(((positions >= 0) & (positions < len(table))).all()), "positions are rows of cos_sin_cache")
    require(query.shape[1] % head_size == 0 and key.shape[1] % head_size == 0, "rows are whole heads")


def through_table(x, positions, table, head_size: int, half: bool) -> torch.Tensor:
    heads = x.unflatten(1, (x.shape[1] // head_size, head_size))
    front, rest = heads.split([table.shape[1], head_size - table.shape[1]], dim=-1)
    return torch.cat((turned(front, *rows_of(table, positions, half), half), rest), dim=-1).flatten(1)
