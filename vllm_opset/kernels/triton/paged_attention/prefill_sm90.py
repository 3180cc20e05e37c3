"""The kernel of paged_attention for prefill on Hopper GPUs, specialised by warps.

Each program is persistent. It takes items of a plan (`_plan_sm90`): a query tile, or a split of its keys. Two loading
warps (`_load_sm90`) start copies by TMA of keys and values into rings of STAGES blocks in shared memory. One of them
also draws the items and publishes them to the other warps. Two or three warpgroups (`_attend_sm90`) compute 64 rows
each. While one computes exponentials, the wgmma of another runs. A warpgroup without rows in a tile skips it, such as
the second one for a decoded token. Splits leave partial results, which another launch combines.

For an fp8 cache, a warpgroup stores its queries as sums of two matrices in fp8, and wgmma multiplies the keys by both.
Two more warps (`_widen_sm90`) convert values to fp16.
"""

import functools
import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vllm_opset.kernels.triton import _launch
from vllm_opset.kernels.triton._gluon import reinterpret
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._products.load_sm90 import available, is_aligned
from vllm_opset.kernels.triton.paged_attention import _call
from vllm_opset.kernels.triton.paged_attention._attend_sm90 import attend_tiles
from vllm_opset.kernels.triton.paged_attention._call import MIN_ROWS, ROW_BYTES, WARPGROUP, Call, thresholds
from vllm_opset.kernels.triton.paged_attention._load_sm90 import (
    TILE_FIELDS,
    TILE_SLOTS,
    WARPGROUP_ROWS,
    attending_warpgroups,
    box_columns,
    cache_layout,
    load_keys,
    load_values,
    rows_of_tile,
)
from vllm_opset.kernels.triton.paged_attention._plan_sm90 import launch_combine, make_plan, most_partials_of
from vllm_opset.kernels.triton.paged_attention._widen_sm90 import WIDENING_WARPS, widen_tiles

ELEMENT_BYTES = 2  # of queries and results: bf16 or fp16
LEAST_KEYS = 64  # of a block: with heads of 256, blocks of 32 took 1.16 of the time in bf16, and 1.22 in fp8
LEAST_HEAD = 64  # columns, which fill a line of shared memory in 16 bits

# The keys are numbers of attending warpgroups. The values are the registers of an attending thread, and those of a
# thread of the other warps, which make one warpgroup. Together they use up a multiprocessor, which runs one program of
# this kernel: 64 Ki registers hold 128 threads * (2 * 232 + 40) and 128 * (3 * 160 + 32). Threads that convert values
# need more than those that load, where two warpgroups attend.
REGISTERS = {2: (232, 40), 3: (160, 32)}
REGISTERS_FP8 = {2: (224, 64), 3: (160, 32)}
WIDENED_ELEMENTS = {2: 2048, 3: 512}  # that a warp converts at a time; twice as many were slower


@gluon.constexpr_function
def _worker_warps(block_d, widens):
    """The warps of each partition but the first one, which is a warpgroup."""
    return [WARPGROUP] * (attending_warpgroups(block_d) - 1) + [1] * (WIDENING_WARPS.value * widens) + [1, 1]


@gluon.constexpr_function
def _worker_registers(block_d, widens):
    """The registers of a thread of each partition but the first one, which has those that are left."""
    number = attending_warpgroups(block_d)
    attending, others = (REGISTERS_FP8 if widens else REGISTERS)[number]
    return [attending] * (number - 1) + [others] * (WIDENING_WARPS.value * widens + 2)


@gluon.constexpr_function
def _layout_of(dtype, block_d):
    """The layout of rows that wgmma multiplies, or that are results."""
    return cache_layout(block_d, dtype.primitive_bitwidth, 2)


@gluon.constexpr_function
def _widened_elements(block_d):
    """The elements of a block that a warp converts at a time."""
    return WIDENED_ELEMENTS[attending_warpgroups(block_d)]


@gluon.constexpr_function
def _loaded_stages(stages, block_d):
    """The places of the ring of values in fp8. Heads above 128 have half as many, which was not compared with more."""
    return stages if block_d * ELEMENT_BYTES <= ROW_BYTES else max(1, stages // 2)


@gluon.jit(do_not_specialize=["num_pages", "most_partials"])
def attend_prefill_sm90(
    query, query_strides, cache, num_pages, out, out_strides,
    query_start_loc, seq_lens, block_table, table_strides, scale, soft_cap, sinks, k_scale, v_scale,
    partials, stats, sizes, items, most_partials, ticket,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Launches at most as many programs as run at a time.

    query, out: rows of aligned 16-byte units. cache: a TMA descriptor of the KV cache with boxes [1, 1, rows,
    columns]; these rows divide BLOCK_SIZE and BLOCK_N. sizes, items: see `Plan`. partials, stats: None if no tile is
    split. ticket: zero, and zero again afterwards.

    The loads before `pdl_wait` read the plan, which is older than the preceding kernel.
    """
    split_blocks, num_items = gl.load(sizes), gl.load(sizes + 1)
    pdl_wait(PDL)
    WIDENS: gl.constexpr = cache.dtype.is_fp8()
    ATTENDING: gl.constexpr = attending_warpgroups(BLOCK_D)
    BOX_ROWS: gl.constexpr = cache.block_type.shape[2]
    LOADED: gl.constexpr = _loaded_stages(STAGES, BLOCK_D) if WIDENS else STAGES
    PARTS: gl.constexpr = query.dtype.element_ty.primitive_bitwidth // cache.dtype.primitive_bitwidth  # of queries
    key_boxes, keys = _boxes(cache, BLOCK_N, BLOCK_D, STAGES)
    value_boxes, loaded_values = _boxes(cache, BLOCK_N, BLOCK_D, LOADED)
    queries = gl.allocate_shared_memory(
        cache.dtype, [ATTENDING * PARTS, WARPGROUP_ROWS, BLOCK_D], _layout_of(cache.dtype, BLOCK_D)
    )
    results = reinterpret(
        queries, out.dtype.element_ty, [ATTENDING, WARPGROUP_ROWS, BLOCK_D], _layout_of(out.dtype.element_ty, BLOCK_D)
    )
    tiles = gl.allocate_shared_memory(
        gl.int32, [TILE_SLOTS * TILE_FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    )
    full_keys, empty_keys = _barriers(STAGES, 1, ATTENDING)
    full_values, empty_values = _barriers(STAGES, WIDENING_WARPS if WIDENS else 1, ATTENDING)
    full_tiles, empty_tiles = _barriers(TILE_SLOTS, 1, ATTENDING + 1 + WIDENING_WARPS * WIDENS)
    cleared = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())  # by all warpgroups
    mbarrier.init(cleared, count=ATTENDING)
    scheduler = (tiles, full_tiles, empty_tiles)
    values, full_loaded, empty_loaded = loaded_values, full_values, empty_values
    if WIDENS:
        values = gl.allocate_shared_memory(gl.float16, [STAGES, BLOCK_N, BLOCK_D], _layout_of(gl.float16, BLOCK_D))
        full_loaded, empty_loaded = _barriers(LOADED, 1, WIDENING_WARPS)

    tensors = (query, query_strides, out, out_strides, sinks, partials, stats)
    scales = (scale, soft_cap, k_scale, v_scale)
    ring = (keys, values, full_keys, empty_keys, full_values, empty_values, cleared)
    batch = (query_start_loc, seq_lens, block_table, table_strides)
    attended = (tensors, queries, results, ring, scheduler, scales, split_blocks)
    keys_source = (
        cache, num_pages, key_boxes, full_keys, empty_keys, scheduler, batch, items, num_items,
        split_blocks, most_partials, ticket,
    )  # fmt: skip
    values_source = (
        cache, num_pages, value_boxes, full_loaded, empty_loaded, scheduler, block_table, table_strides,
        split_blocks,
    )  # fmt: skip
    widened = (loaded_values, full_loaded, empty_loaded, values, full_values, empty_values)
    WIDENED: gl.constexpr = _widened_elements(BLOCK_D)
    # Gluon takes partitions only as a list that is written out.
    if ATTENDING == 2 and WIDENS:
        gl.warp_specialize(
            [
                (attend_tiles, (0, attended, BOX_ROWS, GROUP, HEAD_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D)),
                (attend_tiles, (1, attended, BOX_ROWS, GROUP, HEAD_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D)),
                (widen_tiles, (0, widened, scheduler, split_blocks, WIDENED, BOX_ROWS, LEFT, RIGHT)),
                (widen_tiles, (1, widened, scheduler, split_blocks, WIDENED, BOX_ROWS, LEFT, RIGHT)),
                (
                    load_keys,
                    (keys_source, NUM_KV_HEADS, GROUP, BLOCK_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D, STAGES),
                ),
                (load_values, (values_source, HEAD_SIZE, BLOCK_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D, LOADED)),
            ],
            _worker_warps(BLOCK_D, WIDENS),
            _worker_registers(BLOCK_D, WIDENS),
        )
    elif ATTENDING == 2:
        gl.warp_specialize(
            [
                (attend_tiles, (0, attended, BOX_ROWS, GROUP, HEAD_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D)),
                (attend_tiles, (1, attended, BOX_ROWS, GROUP, HEAD_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D)),
                (
                    load_keys,
                    (keys_source, NUM_KV_HEADS, GROUP, BLOCK_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D, STAGES),
                ),
                (load_values, (values_source, HEAD_SIZE, BLOCK_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D, LOADED)),
            ],
            _worker_warps(BLOCK_D, WIDENS),
            _worker_registers(BLOCK_D, WIDENS),
        )
    elif WIDENS:
        gl.warp_specialize(
            [
                (attend_tiles, (0, attended, BOX_ROWS, GROUP, HEAD_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D)),
                (attend_tiles, (1, attended, BOX_ROWS, GROUP, HEAD_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D)),
                (attend_tiles, (2, attended, BOX_ROWS, GROUP, HEAD_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D)),
                (widen_tiles, (0, widened, scheduler, split_blocks, WIDENED, BOX_ROWS, LEFT, RIGHT)),
                (widen_tiles, (1, widened, scheduler, split_blocks, WIDENED, BOX_ROWS, LEFT, RIGHT)),
                (
                    load_keys,
                    (keys_source, NUM_KV_HEADS, GROUP, BLOCK_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D, STAGES),
                ),
                (load_values, (values_source, HEAD_SIZE, BLOCK_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D, LOADED)),
            ],
            _worker_warps(BLOCK_D, WIDENS),
            _worker_registers(BLOCK_D, WIDENS),
        )
    else:
        gl.warp_specialize(
            [
                (attend_tiles, (0, attended, BOX_ROWS, GROUP, HEAD_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D)),
                (attend_tiles, (1, attended, BOX_ROWS, GROUP, HEAD_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D)),
                (attend_tiles, (2, attended, BOX_ROWS, GROUP, HEAD_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D)),
                (
                    load_keys,
                    (keys_source, NUM_KV_HEADS, GROUP, BLOCK_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D, STAGES),
                ),
                (load_values, (values_source, HEAD_SIZE, BLOCK_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D, LOADED)),
            ],
            _worker_warps(BLOCK_D, WIDENS),
            _worker_registers(BLOCK_D, WIDENS),
        )


@gluon.jit
def _boxes(cache, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr):
    """A ring in shared memory: its boxes, and the same memory as blocks of keys or values."""
    BITS: gl.constexpr = cache.dtype.primitive_bitwidth
    BOX: gl.constexpr = cache.block_type.shape
    NUM_BOXES: gl.constexpr = STAGES * (BLOCK_N // BOX[2]) * (BLOCK_D // BOX[3])
    boxes = gl.allocate_shared_memory(cache.dtype, [NUM_BOXES, 1, 1, BOX[2], BOX[3]], cache_layout(BLOCK_D, BITS, 4))
    return boxes, reinterpret(boxes, cache.dtype, [STAGES, BLOCK_N, BLOCK_D], cache_layout(BLOCK_D, BITS, 2))


@gluon.jit
def _barriers(COUNT: gl.constexpr, WRITERS: gl.constexpr, READERS: gl.constexpr):
    """Two barriers for each place of a ring: all of its writers are done, and all of its readers."""
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(COUNT):
        mbarrier.init(full.index(place), count=WRITERS)
        mbarrier.init(empty.index(place), count=READERS)
    return full, empty


@functools.cache
def _rows_of_tile(block_d: int) -> int:
    """Cached, because Triton takes a microsecond to call a function of the device from the host."""
    return rows_of_tile(block_d)


@functools.cache
def _box(block_d: int, bits: int) -> tuple[int, NVMMASharedLayout]:
    """The columns of a box of the cache, and its layout. Cached like `_rows_of_tile`."""
    return box_columns(block_d, bits), cache_layout(block_d, bits, 4)


def _ring(call: Call, values: _launch.Parameters) -> tuple[int, int]:
    """The keys of a block, and the places of a ring. Where rows are long, a few large blocks are faster than many."""
    block_n, stages = call.block_n(values), values["stages"]
    enlarged = max(block_n, LEAST_KEYS)
    return enlarged, max(1, stages * block_n // enlarged)


def can_prefill_sm90(call: Call) -> bool:
    """Whether a Hopper GPU's copy engine and matrix instructions take these inputs."""
    if not available(call.query.device):
        return False
    halves = call.query.element_size() == ELEMENT_BYTES
    unscaled = call.k_scale is None and call.v_scale is None
    # Queries in fp16 would need three matrices in fp8, and sums of products in fp8 are not as accurate as fp16.
    fp8 = call.kv_cache.dtype == torch.float8_e4m3fn and call.query.dtype == torch.bfloat16
    cached = fp8 or (call.kv_cache.dtype == call.query.dtype and unscaled)
    boxes = call.head_size >= LEAST_HEAD and call.block_size % MIN_ROWS == 0
    aligned = all(map(is_aligned, (call.query, call.kv_cache, call.out)))
    return call.alibi_slopes is None and halves and cached and boxes and aligned


def suits_prefill_sm90(call: Call) -> bool:
    """Whether no other variant is faster: for more rows than `verify` takes, and for drafts that fill the GPU."""
    num_programs, table = _launch.multiprocessors(call.query.device), thresholds(call.query.device)
    many = call.num_reqs * call.num_kv_heads >= table["verify_tiles_sm90"] * num_programs
    drafts = call.most_rows > MIN_ROWS and many and call.batch.max_seq_len <= table["verify_keys_sm90"]
    return call.most_rows > table["verify_rows"] or drafts


def launch_prefill_sm90(call: Call) -> None:
    """One launch of persistent programs, and others for the plan of a step and to combine partial results."""
    device, batch, cache = call.query.device, call.batch, call.kv_cache
    rows = _rows_of_tile(call.block_d)
    queries = rows // call.group
    values = _launch.parameters("paged_attention_prefill_sm90", device, call.span(queries))
    block_n, stages = _ring(call, values)
    num_tiles = call.query.shape[0] // queries + call.num_reqs
    columns, layout = _box(call.block_d, cache.element_size() * 8)
    box = [1, 1, math.gcd(call.block_size, block_n), columns]
    most_partials, partials = most_partials_of(call, values, queries), (None, None)
    if most_partials > 0:
        partials = batch.once(_call.workspace, most_partials * call.num_kv_heads, rows, call.block_d)
    made = batch.once(
        make_plan, num_tiles, queries, call.num_kv_heads, call.left, call.right, box[2], block_n, most_partials,
        tuple(values.items()),
    )  # fmt: skip
    descriptor = TensorDescriptor.from_tensor(cache, box, layout)
    _launch.launch(
        attend_prefill_sm90, (min(made.items.shape[0] * call.num_kv_heads, _launch.multiprocessors(device)),),
        call.query, call.query.stride(), descriptor, cache.shape[0], call.out, call.out.stride(),
        batch.query_start_loc, batch.seq_lens, batch.block_table, batch.block_table.stride(),
        call.scale, call.soft_cap or None, call.sinks, call.k_scale, call.v_scale, *partials,
        made.sizes, made.items, most_partials, made.ticket,
        NUM_KV_HEADS=call.num_kv_heads, GROUP=call.group, HEAD_SIZE=call.head_size, BLOCK_SIZE=call.block_size,
        LEFT=call.left, RIGHT=call.right, BLOCK_N=block_n, BLOCK_D=call.block_d, STAGES=stages,
        num_warps=WARPGROUP, **_launch.launch_options(device),
    )  # fmt: skip
    if most_partials > 0:
        launch_combine(call, made, partials, most_partials, rows)
