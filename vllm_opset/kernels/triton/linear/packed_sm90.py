"""linear with int4 weights for some tokens, on Hopper GPUs: dequantised in registers, multiplied by wgmma.

Outputs are the rows of the products, since wgmma takes those from registers: nothing of the dequantised weight is
stored. One warp brings stages of 128 columns of the weight and of x into a ring in shared memory by TMA. A warpgroup
dequantises 64 columns while the products of the 64 before run.

All tiles' stages make one row, of which each program takes an equal part. So a program begins and ends within tiles.
Those that share a tile store their sums, and the last one adds them, always in the same order.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vllm_opset.kernels.triton import _launch
from vllm_opset.kernels.triton._gluon import barrier, tma_load
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._products.counters import zeros
from vllm_opset.kernels.triton._products.int4 import NO_ZERO_POINT, scale_columns
from vllm_opset.kernels.triton._products.int4_words_sm90 import (
    BYTES,
    CHUNK,
    ROWS,
    dequantised,
    group_offsets,
    groups_of_chunk,
    rows_of_chunk,
)
from vllm_opset.kernels.triton._products.load_sm90 import (
    LOADING_REGISTERS,
    available,
    barriers,
    box_layout,
    first_row_of,
    is_aligned,
    load_rows,
)
from vllm_opset.kernels.triton._rows import num_rows
from vllm_opset.ops.schemes import values_shape

WIDTH = gl.constexpr(128)  # A stage has so many columns.
FEWEST_TOKENS = 16


@gluon.constexpr_function
def _loads_of_stage(group):
    """The number of loads for the scales of a row in a stage: one if there is one scale, else one for each CHUNK."""
    return 1 if group >= WIDTH.value else WIDTH.value // CHUNK.value


@gluon.jit
def _part_of(num_stages):
    """The first stage of a program, and the one after its last."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    return num_stages * program // programs, num_stages * (program + 1) // programs


@gluon.jit
def _program_of(stage, num_stages):
    """The program that takes a stage."""
    return ((stage + 1) * gl.num_programs(0) - 1) // num_stages


@gluon.jit
def _load(x, weight, ring, tiles, num_tokens):
    """The loading warp."""
    x_ring, w_ring, full, empty = ring
    STAGES: gl.constexpr = w_ring.shape[0]
    OUTPUTS: gl.constexpr = w_ring.shape[1]
    TOKENS: gl.constexpr = x_ring.shape[1]
    BYTES: gl.constexpr = OUTPUTS * WIDTH // 2 + TOKENS * WIDTH * 2
    num_tiles, token_tiles, tile_stages = tiles
    begin, end = _part_of(num_tiles * tile_stages)
    for unit in range(begin, end):
        tile, step, done = unit // tile_stages, unit % tile_stages, unit - begin
        stage = done % STAGES
        mbarrier.wait(empty.index(stage), done // STAGES & 1 ^ 1)
        mbarrier.expect(full.index(stage), BYTES)
        corner = [tile // token_tiles * OUTPUTS, step * (WIDTH // 4)]
        tma_load(weight, corner, full.index(stage), w_ring.index(stage))
        first_token = first_row_of(tile % token_tiles, num_tokens, TOKENS)
        for line in gl.static_range(WIDTH // CHUNK):
            place = x_ring.index(stage * (WIDTH // CHUNK) + line)
            load_rows(x, first_token, step * WIDTH + line * CHUNK, num_tokens, full.index(stage), place)


@gluon.jit
def _of_stage(pointers, step, GROUP: gl.constexpr, column_stride):
    """The scales of a stage, or the zero points, at each of the pointers. Small groups take several loads."""
    found = ()
    for number in gl.static_range(len(pointers)):
        for load in gl.static_range(_loads_of_stage(GROUP)):
            found += (gl.load(pointers[number] + (step * WIDTH + load * CHUNK) // GROUP * column_stride),)
    return found


@gluon.jit
def _factor(
    NUMBER: gl.constexpr, stage, w_ring, of_stage, INDEX: gl.constexpr, PARTS: gl.constexpr, FACTOR: gl.constexpr,
    GROUP: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The dequantised weights for product NUMBER of a stage. It has the parts' products by its first CHUNK columns,
    then those by the next ones.

    of_stage: the scales of each part, then its zero points if there are any.
    """
    PART: gl.constexpr = NUMBER % PARTS
    LOADS: gl.constexpr = _loads_of_stage(GROUP)
    LOAD: gl.constexpr = PART * LOADS + NUMBER // PARTS % LOADS
    w = w_ring.index(stage).slice((INDEX * PARTS + PART) * ROWS, ROWS)
    w = w.slice(NUMBER // PARTS * (CHUNK // 4), CHUNK // 4, 1).load(BYTES)
    scale = of_stage[LOAD].to(dtype)
    if len(of_stage) == PARTS * LOADS:
        zero = gl.full(scale.shape, NO_ZERO_POINT, gl.float32, scale.type.layout)
    else:
        zero = of_stage[PARTS * LOADS + LOAD].to(gl.float32)
    return dequantised(w, zero, scale, FACTOR)


@gluon.jit
def _multiply(INDEX: gl.constexpr, ring, staging, tiles, scales, results, GROUP: gl.constexpr):
    """The products of one warpgroup: some times ROWS of the outputs of each tile."""
    x_ring, w_ring, full, empty = ring
    STAGES: gl.constexpr = w_ring.shape[0]
    OUTPUTS: gl.constexpr = w_ring.shape[1]
    TOKENS: gl.constexpr = x_ring.shape[1]
    PARTS: gl.constexpr = OUTPUTS // (staging.shape[0] * ROWS)
    scale, zero_point, scale_stride, column_stride = scales
    num_tiles, token_tiles, tile_stages = tiles
    num_outputs = results[5]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    NUMBERS: gl.constexpr = PARTS * (WIDTH // CHUNK)
    dtype: gl.constexpr = x_ring.dtype
    GROUPS: gl.constexpr = groups_of_chunk(GROUP)
    row = rows_of_chunk(GROUPS)
    begin, end = _part_of(num_tiles * tile_stages)
    for tile in range(begin // tile_stages, (end - 1) // tile_stages + 1):
        first_step = gl.maximum(begin - tile * tile_stages, 0)
        last_step = gl.minimum(end - tile * tile_stages, tile_stages) - 1
        first_done = tile * tile_stages - begin  # stages before those of this tile, less first_step
        first_output = tile // token_tiles * OUTPUTS + INDEX * PARTS * ROWS
        pointers, zero_pointers, sums = (), (), ()
        for part in gl.static_range(PARTS):
            # Rows beyond the last output are zero, as the copy engine brings them, whatever their scale is.
            output = gl.minimum(first_output + part * ROWS + row, num_outputs - 1).to(gl.int64)
            offsets = group_offsets(output, scale_stride, column_stride, GROUPS)
            pointers += (scale + offsets,)
            sums += (gl.zeros([ROWS, TOKENS], gl.float32, SUMS),)
            if zero_point is not None:
                zero_pointers += (zero_point + offsets,)
        pointers += zero_pointers
        of_stage = _of_stage(pointers, first_step, GROUP, column_stride)
        following = _of_stage(pointers, gl.minimum(first_step + 1, last_step), GROUP, column_stride)
        done = first_done + first_step
        mbarrier.wait(full.index(done % STAGES), done // STAGES & 1)
        factor = _factor(0, done % STAGES, w_ring, of_stage, INDEX, PARTS, FACTOR, GROUP, dtype)
        for step in range(first_step, last_step + 1):
            done = first_done + step
            stage = done % STAGES
            for number in gl.static_range(NUMBERS):
                x = x_ring.index(stage * (WIDTH // CHUNK) + number // PARTS).permute((1, 0))
                product = hopper.warpgroup_mma(factor, x, sums[number % PARTS], is_async=True)
                sums = _with_product(sums, product, number % PARTS)
                if number > 0:  # Two products are in flight, and the weights of the first one are replaced.
                    sums = _waited(sums)
                if number < NUMBERS - 1:
                    next_factor = _factor(number + 1, stage, w_ring, of_stage, INDEX, PARTS, FACTOR, GROUP, dtype)
                else:
                    # The last stage's first weights are dequantised once more, and not used.
                    next_done = first_done + gl.minimum(step + 1, last_step)
                    of_stage = following
                    after = gl.minimum(step + 2, last_step)
                    following = _of_stage(pointers, after, GROUP, column_stride)
                    mbarrier.wait(full.index(next_done % STAGES), next_done // STAGES & 1)
                    next_factor = _factor(0, next_done % STAGES, w_ring, of_stage, INDEX, PARTS, FACTOR, GROUP, dtype)
                if number < NUMBERS - 1:
                    factor = next_factor
                else:
                    sums, factor = _all_waited(sums, next_factor)
            mbarrier.arrive(empty.index(stage))
        _finish(INDEX, sums, staging, tile, tiles, results, PARTS)


@gluon.jit
def _with_product(sums, product, PART: gl.constexpr):
    """The sums with the product for a part, which still runs."""
    found = ()
    for part in gl.static_range(len(sums)):
        if part == PART:
            found += (product,)
        else:
            found += (sums[part],)
    return found


@gluon.jit
def _waited(sums):
    """The sums when no more than the last product runs."""
    waited = hopper.warpgroup_mma_wait(1, deps=sums)
    if len(sums) == 1:
        return (waited,)
    else:
        return waited


@gluon.jit
def _all_waited(sums, factor):
    """The sums when no product runs, and the next factor, which was made before."""
    waited = hopper.warpgroup_mma_wait(0, deps=sums + (factor,))  # noqa: RUF005 (Triton has no starred expressions)
    found = ()
    for part in gl.static_range(len(sums)):
        found += (waited[part],)
    return found, waited[len(sums)]


@gluon.jit
def _finish(INDEX: gl.constexpr, sums, staging, tile, tiles, results, PARTS: gl.constexpr):
    """Writes the results of a warpgroup for a tile, or its sums if other programs have stages of the tile and follow.

    partials: [programs, 2, tile's outputs, tile's tokens]. A program has sums of at most two tiles: of one that begins
    in a program before, and of one that it begins. counters: zero, one for each warpgroup and tile. They stay zero.
    """
    num_tiles, token_tiles, tile_stages = tiles
    bias, out, partials, counters, num_tokens, num_outputs = results
    SUMS: gl.constexpr = sums[0].type.layout
    dtype: gl.constexpr = staging.dtype
    WARPGROUPS: gl.constexpr = staging.shape[0]
    TOKENS: gl.constexpr = staging.shape[2]
    PARTIAL: gl.constexpr = WARPGROUPS * PARTS * ROWS * TOKENS
    first = _program_of(tile * tile_stages, num_tiles * tile_stages)
    last = _program_of(tile * tile_stages + tile_stages - 1, num_tiles * tile_stages)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
    place = row[:, None] * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(0, SUMS))[None, :]
    place += INDEX * PARTS * ROWS * TOKENS
    is_last = first == last
    if first != last:
        program = gl.program_id(0)
        own = partials + (2 * program + (program == first).to(gl.int32)).to(gl.int64) * PARTIAL
        for part in gl.static_range(PARTS):
            gl.store(own + part * (ROWS * TOKENS) + place, sums[part])
        barrier()  # all threads' stores come before the count
        counter = counters + tile * WARPGROUPS + INDEX
        is_last = gl.atomic_add(counter, 1, sem="acq_rel") == last - first
        if is_last:
            gl.store(counter, 0)
    if is_last:
        first_output = (tile // token_tiles * WARPGROUPS + INDEX) * (PARTS * ROWS)
        for part in gl.static_range(PARTS):
            total = sums[part]
            if first != last:
                total = gl.zeros([ROWS, TOKENS], gl.float32, SUMS)
                for program in range(first, last + 1):
                    of_program = partials + (2 * program + (program == first).to(gl.int32)).to(gl.int64) * PARTIAL
                    total += gl.load(of_program + part * (ROWS * TOKENS) + place, cache_modifier=".cg")
            if bias is not None:
                output = gl.minimum(first_output + part * ROWS + row, num_outputs - 1)
                total += gl.load(bias + output).to(gl.float32)[:, None]
            _store(
                total.to(dtype), staging.index(INDEX), out, first_output + part * ROWS, tile % token_tiles,
                num_tokens, num_outputs,
            )  # fmt: skip


@gluon.jit
def _store(y, staging, out, first_output, token_tile, num_tokens, num_outputs):
    """Writes results in whole lines, by way of shared memory. Each token belongs to one tile alone, since tiles add
    their sums in different orders.
    """
    TOKENS: gl.constexpr = staging.shape[1]
    LINES: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    staging.store(y)
    output = first_output + gl.arange(0, ROWS, gl.SliceLayout(1, LINES))
    token = first_row_of(token_tile, num_tokens, TOKENS) + gl.arange(0, TOKENS, gl.SliceLayout(0, LINES))
    inside = (output < num_outputs)[:, None] & ((token >= token_tile * TOKENS) & (token < num_tokens))[None, :]
    gl.store(out + token.to(gl.int64)[None, :] * num_outputs + output[:, None], staging.load(LINES), inside)


@gluon.jit(do_not_specialize=["num_tokens", "num_tiles", "token_tiles", "tile_stages"])
def packed_gemm_sm90(
    x, weight, scale, zero_point, bias, out, partials, counters, num_tokens, num_outputs,
    num_tiles, token_tiles, tile_stages, scale_stride, column_stride,
    TOKENS: gl.constexpr, WARPGROUPS: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """x, weight: TMA descriptors of boxes [TOKENS or fewer, CHUNK] and [WARPGROUPS * PARTS * ROWS, WIDTH / 4] of
    pairs of bytes.

    REGISTERS: of the threads that multiply, except for the first warpgroup's, which get the rest.
    """
    pdl_wait(PDL)
    dtype: gl.constexpr = out.dtype.element_ty
    x_ring = gl.allocate_shared_memory(
        dtype, [STAGES * (WIDTH // CHUNK), TOKENS, CHUNK], gl.NVMMASharedLayout(128, 16, rank=2)
    )
    w_ring = gl.allocate_shared_memory(
        gl.int16, [STAGES, WARPGROUPS * PARTS * ROWS, WIDTH // 4], gl.NVMMASharedLayout(64, 16, rank=2)
    )
    staging = gl.allocate_shared_memory(
        dtype, [WARPGROUPS, ROWS, TOKENS], gl.NVMMASharedLayout(128, 16, rank=2, transposed=True)
    )
    full, empty = barriers(STAGES, 0, WARPGROUPS)
    ring = (x_ring, w_ring, full, empty)
    tiles = (num_tiles, token_tiles, tile_stages)
    scales = (scale, zero_point, scale_stride, column_stride)
    results = (bias, out, partials, counters, num_tokens, num_outputs)
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (0, ring, staging, tiles, scales, results, GROUP)),
                (_multiply, (1, ring, staging, tiles, scales, results, GROUP)),
                (_load, (x, weight, ring, tiles, num_tokens)),
            ],
            [4, 1],
            [REGISTERS, LOADING_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (0, ring, staging, tiles, scales, results, GROUP)),
                (_multiply, (1, ring, staging, tiles, scales, results, GROUP)),
                (_multiply, (2, ring, staging, tiles, scales, results, GROUP)),
                (_multiply, (3, ring, staging, tiles, scales, results, GROUP)),
                (_load, (x, weight, ring, tiles, num_tokens)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, LOADING_REGISTERS],
        )


def fits(x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> bool:
    """Whether the variant `packed_sm90` can multiply: stages of whole groups or of one scale, in 16 bits, at aligned
    addresses.
    """
    rows, columns, group = x.reshape(-1, x.shape[-1]), x.shape[-1], scale_columns(weight, weight_scale)
    aligned = is_aligned(rows) and is_aligned(weight) and x.element_size() == 2 and len(rows)
    of_groups = WIDTH.value % group == 0 and columns % WIDTH.value == 0
    of_one_scale = group % WIDTH.value == 0 or group == columns >= WIDTH.value
    return bool(available(x.device) and aligned) and (of_groups or of_one_scale)


def suits(x: torch.Tensor, ring: bool) -> bool:
    """Whether this is the fastest variant for what it can multiply.

    ring: whether the variant `ring` can multiply too. It is faster for few tokens.
    """
    bounds = _launch.parameters("tokens_linear_packed_sm90", x.device, 0)
    return (bounds["least_tokens"] if ring else 0) <= num_rows(x) <= bounds["most_tokens"]


def packed_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor,
    weight_zero_point: torch.Tensor | None,
) -> torch.Tensor:
    """The product of the contract by the variant `packed_sm90`, for arguments that were checked."""
    (outputs, columns), rows, device = values_shape(weight), x.reshape(-1, x.shape[-1]), x.device
    values = _launch.parameters("linear_packed_sm90", device, len(rows))
    tokens = min(max(_launch.next_power_of_2(len(rows)), FEWEST_TOKENS), values["tokens"])
    tile_outputs = values["warpgroups"] * values["parts"] * ROWS.value
    token_tiles, tile_stages = _launch.cdiv(len(rows), tokens), _launch.cdiv(columns, WIDTH.value)
    num_tiles = _launch.cdiv(outputs, tile_outputs) * token_tiles
    num_programs = min(values["programs"], num_tiles * tile_stages)
    out = x.new_empty((*x.shape[:-1], outputs))
    partials = x.new_empty((num_programs, 2, tile_outputs, tokens), dtype=torch.float32)
    boxes = [min(values["box"], tokens), CHUNK.value], [tile_outputs, WIDTH.value // 4]
    descriptors = (
        TensorDescriptor.from_tensor(rows, boxes[0], box_layout(128, 16)),
        TensorDescriptor.from_tensor(weight.view(torch.int16), boxes[1], box_layout(64, 16)),
    )
    _launch.launch(
        packed_gemm_sm90, (num_programs,),
        *descriptors, weight_scale, weight_zero_point, bias, out, partials,
        zeros(device, num_tiles * values["warpgroups"]), len(rows), outputs,
        num_tiles, token_tiles, tile_stages, *weight_scale.stride(),
        TOKENS=tokens, WARPGROUPS=values["warpgroups"], PARTS=values["parts"],
        GROUP=scale_columns(weight, weight_scale), STAGES=values["stages"], REGISTERS=values["registers"],
        num_warps=4, **_launch.launch_options(device),
    )  # fmt: skip
    return out
