"""Tiles of `decode_sm90`: loads and products of a unit, and results.

Outputs are rows and tokens are columns. A warpgroup has its rows of a tile in parts: one product each for 128 bytes of
columns. The sums of a tile are a tuple of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from vllm_opset.kernels.triton._gluon import tma_load
from vllm_opset.kernels.triton._products.load_sm90 import LINE
from vllm_opset.kernels.triton._products.shared_tiles import sums_of_tile

SUM_BYTES = gl.constexpr(32)  # So many bytes of a row are the columns of one instruction.
# Arguments of both kernels for which Triton compiles nothing anew. One tile of tokens has kernels of its own, without
# divisions by the number of these tiles.
UNSPECIALISED = {
    "do_not_specialize": [
        "ws_row", "ws_column", "xs_row", "xs_column", "num_tokens", "num_blocks", "tile_units", "num_units", "run",
    ],
    "do_not_specialize_on_alignment": ["token_tiles"],
}  # fmt: skip


@gluon.jit
def parts_of_tile(tile, sizes):
    """Returns the rows of the weight and the tokens that a tile has, each as the number of tiles that come before.

    sizes: num_tokens, num_outputs, num_blocks, tile_units, run and token_tiles of `decode_sm90`.
    """
    token_tiles = sizes[5]
    return tile // token_tiles, tile % token_tiles


@gluon.jit
def load_weight(weight, ring, stage, unit, end, sizes, LINES: gl.constexpr):
    """Lets the stage's barrier await a unit of the weight and of x, and brings the first."""
    w_ring, x_ring, full = ring
    tile_units = sizes[3]
    ROWS: gl.constexpr = w_ring.shape[1]
    TOKENS: gl.constexpr = x_ring.shape[1]
    WIDTH: gl.constexpr = w_ring.shape[2]
    mbarrier.expect(full.index(stage), LINES * (ROWS + TOKENS) * LINE, pred=unit < end)
    weight_tile, _ = parts_of_tile(unit // tile_units, sizes)
    for line in gl.static_range(LINES):
        corner = [weight_tile * ROWS, (unit % tile_units * LINES + line) * WIDTH]
        place = w_ring.index(stage * LINES + line)
        tma_load(weight, corner, full.index(stage), place, pred=unit < end)


@gluon.jit
def load_x(x, ring, stage, unit, end, sizes, LINES: gl.constexpr):
    _, x_ring, full = ring
    tile_units = sizes[3]
    TOKENS: gl.constexpr = x_ring.shape[1]
    WIDTH: gl.constexpr = x_ring.shape[2]
    _, token_tile = parts_of_tile(unit // tile_units, sizes)
    for line in gl.static_range(LINES):
        corner = [token_tile * TOKENS, (unit % tile_units * LINES + line) * WIDTH]
        place = x_ring.index(stage * LINES + line)
        tma_load(x, corner, full.index(stage), place, pred=unit < end)


@gluon.jit
def add(sums, w_ring, x_ring, stage, FIRST_ROW: gl.constexpr, LINES: gl.constexpr):
    """Adds the products of a unit on tensor cores. FIRST_ROW: of the warpgroup, in the tile."""
    ROWS: gl.constexpr = sums[0].shape[0]
    for line in gl.static_range(LINES):
        x = x_ring.index(stage * LINES + line).permute((1, 0))
        added = ()
        for part in gl.static_range(len(sums)):
            w = w_ring.index(stage * LINES + line).slice(FIRST_ROW + part * ROWS, ROWS)
            added += (hopper.warpgroup_mma(w, x, sums[part], is_async=True),)
        sums = added
    if len(sums) == 1:
        return (hopper.warpgroup_mma_wait(0, deps=sums),)
    else:
        return hopper.warpgroup_mma_wait(0, deps=sums)


@gluon.jit
def add_scaled(sums, scales, w_ring, x_ring, stage, FIRST_ROW: gl.constexpr, LINES: gl.constexpr):
    """Adds the products of a unit, multiplied by their scales: for each line those of x, and that of the weight."""
    ROWS: gl.constexpr = sums[0].shape[0]
    PARTS: gl.constexpr = len(sums)
    SUMS: gl.constexpr = sums[0].type.layout
    nothing = gl.zeros(sums[0].shape, gl.float32, SUMS)
    products = ()
    for line in gl.static_range(LINES):
        x = x_ring.index(stage * LINES + line).permute((1, 0))
        for part in gl.static_range(PARTS):
            w = w_ring.index(stage * LINES + line).slice(FIRST_ROW + part * ROWS, ROWS)
            products += (hopper.warpgroup_mma(w, x, nothing, use_acc=False, is_async=True),)
    for line in gl.static_range(LINES):
        scale = scales[2 * line] * scales[2 * line + 1]
        added = ()
        for part in gl.static_range(PARTS):
            # The first argument is the number of products that still run.
            product = products[line * PARTS + part]
            product = hopper.warpgroup_mma_wait((LINES - line) * PARTS - 1 - part, deps=(product,))
            added += (sums[part] + product * scale[None, :],)
        sums = added
    return sums


@gluon.jit
def finish(
    sums, scales, bias, out, partials, counters, tile, sizes,
    BY_BLOCKS: gl.constexpr, INDEX: gl.constexpr, WARPGROUPS: gl.constexpr,
):  # fmt: skip
    """Stores the results of a tile, if this is its only program or the last one.

    Each of WARPGROUPS parts of the threads does so for its own rows. INDEX: of this one.
    """
    PARTS: gl.constexpr = len(sums)
    _, _, _, tile_units, run, _ = sizes
    is_last, sums = sums_of_tile(sums, partials, counters, tile, tile_units, run, INDEX, WARPGROUPS)
    if is_last:
        weight_tile, token_tile = parts_of_tile(tile, sizes)
        for part in gl.static_range(PARTS):
            row_tile = (weight_tile * WARPGROUPS + INDEX) * PARTS + part
            _store(sums[part], scales, bias, out, row_tile, token_tile, sizes, BY_BLOCKS)


@gluon.jit
def _store(y, scales, bias, out, row_tile, token_tile, sizes, BY_BLOCKS: gl.constexpr):
    """row_tile, token_tile: the number of tiles with as many rows or columns as y that come before."""
    ROWS: gl.constexpr = y.shape[0]
    TOKENS: gl.constexpr = y.shape[1]
    SUMS: gl.constexpr = y.type.layout
    WARPS: gl.constexpr = gl.num_warps()
    # A thread writes 16 bytes of a token's results.
    WHOLE: gl.constexpr = gl.BlockedLayout([8, 1], [ROWS // 8, 256 // ROWS], [1, WARPS], [0, 1])
    weight_scale, ws_row, _, x_scale, xs_row, _ = scales
    num_tokens, num_outputs, _, _, _, _ = sizes
    first_token = token_tile * TOKENS
    output = row_tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
    if weight_scale is not None and not BY_BLOCKS:
        token = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, SUMS))
        y *= gl.load(weight_scale + output * ws_row, output < num_outputs, 0.0)[:, None]
        y *= gl.load(x_scale + token * xs_row, token < num_tokens, 0.0)[None, :]
    if bias is not None:
        y += gl.load(bias + output, output < num_outputs, 0.0).to(gl.float32)[:, None]
    y = gl.convert_layout(y.to(out.dtype.element_ty), WHOLE)
    output = row_tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, WHOLE))
    token = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, WHOLE))
    result = token.to(gl.int64)[None, :] * num_outputs + output[:, None]
    gl.store(out + result, y, (output < num_outputs)[:, None] & (token < num_tokens)[None, :])
