"""Calls of `scaled_gemm_sm90`: which products in fp8 it takes on Hopper GPUs, and how it is launched."""

import functools
import math
from typing import NamedTuple

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vllm_opset.kernels.triton import _launch
from vllm_opset.kernels.triton._products.counters import zeros
from vllm_opset.kernels.triton._products.load_sm90 import available, box_layout, is_aligned
from vllm_opset.kernels.triton._products.scaled_gemm_sm90 import HALF, WIDTH, scaled_gemm_sm90
from vllm_opset.kernels.triton._products.shared_tiles import Schedule, TurnCosts, costs_of, fastest_schedules
from vllm_opset.kernels.triton._products.tiles import Order
from vllm_opset.ops.schemes import FP8, WHOLE, GroupShape, group_of

OUT_BYTES = 2  # Results of 32 bits do not fit shared memory beside the ring.
NOTHING_SHARED = None, None, None, None  # arguments of a kernel whose programs share no tiles
BLOCKS, TOKEN_BLOCKS = GroupShape(WIDTH.value, WIDTH.value), GroupShape(1, WIDTH.value)


class Operands(NamedTuple):
    """What a call multiplies. weight: [outputs, columns], or [experts, outputs, columns]."""

    x: torch.Tensor
    weight: torch.Tensor
    weight_scale: torch.Tensor | None
    x_scale: torch.Tensor | None
    out_dtype: torch.dtype | None


def can(call: Operands) -> bool:
    """Whether a Hopper GPU multiplies these by its own kernel: fp8 by blocks of 128, or by rows or whole tensors."""
    if call.x_scale is None or not available(call.x.device):
        return False
    stored = call.x.dtype is FP8 and call.weight.dtype is FP8 and call.out_dtype.itemsize == OUT_BYTES
    aligned = all(map(is_aligned, (call.x, call.weight))) and call.x.ndim == 2 and len(call.x)
    return bool(stored and aligned) and (by_blocks(call) or by_rows(call))


def scaled_linear(call: Operands, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of the contract of `linear`, for arguments that were checked."""
    out = call.x.new_empty((call.x.shape[0], call.weight.shape[0]), dtype=call.out_dtype)
    for launch in launches_of(call) if _launch.is_warm_up() else [launch_of(call)]:
        _launch_linear(launch, call, bias, out)
    return out


def _launch_linear(launch: "Launch", call: Operands, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    (tokens, outputs), tile = out.shape, launch.tile
    num_tiles, all_tiles = tile.number(tokens, outputs)
    num_programs, whole, run = launch.schedule
    shared = NOTHING_SHARED
    if whole < all_tiles:
        partials = out.new_empty((2 * num_programs, tile.rows, tile.outputs), dtype=torch.float32)
        shared = partials, zeros(out.device, 2 * (all_tiles - whole)), whole, run
    x = TensorDescriptor.from_tensor(call.x, [launch.values["box"], WIDTH.value], box_layout(128, 8))
    copied_results = is_aligned(out)
    results = _results(out, tile.rows) if copied_results else (out, None)
    _launch_scaled(
        num_programs, call, x, bias, results, (0, *strides(call.weight_scale)),
        (None, None, tokens, num_tiles, 1), shared, launch.values,
        ROWS=tile.rows, PARTS=tile.parts, BLOCK_SIZE=None, TILES=1, COPIED_RESULTS=copied_results,
    )  # fmt: skip


def scaled_grouped_gemm(call: Operands, bias: torch.Tensor | None, out: torch.Tensor, order: Order) -> None:
    """Writes the product of the contract of `grouped_gemm` to out."""
    values = _launch.parameters("scaled_grouped_gemm_prefill_sm90", out.device, order.block_size)
    rows = min(values["rows"], order.block_size)
    tile = Tile(rows, max(values["outputs"], 2 * HALF.value * WIDTH.value // rows))
    tiles = _launch.cdiv(order.block_size, tile.rows)
    num_tiles = order.num_blocks * tiles
    all_tiles = num_tiles * _launch.cdiv(call.weight.shape[1], tile.outputs)
    # Tiles of experts differ in their work, since some have no choices, so rounds do not tell how long those take.
    num_programs = min(all_tiles, _launch.multiprocessors(out.device))
    _launch_scaled(
        num_programs, call, call.x, bias, (out, None), strides(call.weight_scale),
        (order.sorted_token_ids, order.expert_ids, len(out), num_tiles, order.top_k), NOTHING_SHARED, values,
        ROWS=tile.rows, PARTS=tile.parts, BLOCK_SIZE=order.block_size, TILES=tiles,
        COPIED_RESULTS=False,  # They are scattered.
    )  # fmt: skip


def _launch_scaled(
    num_programs: int, call: Operands, x, bias: torch.Tensor | None, outs: tuple, w_strides: tuple[int, ...],
    tiles: tuple, shared: tuple, values: _launch.Parameters, **constants,
) -> None:  # fmt: skip
    """Launches the kernel. x: a tensor or a descriptor. outs: out and last_out. values: group and stages."""
    outputs, columns = call.weight.shape[-2:]
    weight = TensorDescriptor.from_tensor(call.weight.view(-1, columns), [WIDTH.value, WIDTH.value], box_layout(128, 8))
    _launch.launch(
        scaled_gemm_sm90, (num_programs,),
        x, call.x.stride(0), weight, bias, *outs, call.weight_scale, *w_strides, call.x_scale, *strides(call.x_scale),
        *tiles, *shared, OUTPUTS=outputs, COLUMNS=columns, BY_BLOCKS=by_blocks(call),
        GROUP=values["group"], STAGES=values["stages"], **constants,
        num_warps=4, **_launch.launch_options(call.x.device),
    )  # fmt: skip


class Tile(NamedTuple):
    """A tile's rows and outputs. Two warpgroups have half of its rows each, or of its outputs if it has 64 rows."""

    rows: int
    outputs: int

    @property
    def parts(self) -> int:
        """A warpgroup's products for each stage."""
        return self.rows * self.outputs // (2 * HALF.value * WIDTH.value)

    def number(self, tokens: int, outputs: int) -> tuple[int, int]:
        """How many tiles of rows there are, and how many tiles."""
        num_tiles = _launch.cdiv(tokens, self.rows)
        return num_tiles, num_tiles * _launch.cdiv(outputs, self.outputs)


TILES = (Tile(128, 128), Tile(64, 256), Tile(128, 256))  # of dense products
# The launch of each tile, without scales by blocks and with them.
NAMES = [
    {tile: f"{scheme}_{tile.rows}x{tile.outputs}_linear_scaled_sm90" for tile in TILES} for scheme in ("rows", "blocks")
]


class Launch(NamedTuple):
    """values: the launch parameters. schedule: of its steps. time: in ns, by the costs of programs."""

    tile: Tile
    values: _launch.Parameters
    schedule: Schedule
    time: float


def launch_of(call: Operands) -> Launch:
    """The fastest launch for a dense product that this kernel can multiply, by the costs of its programs."""
    return launches_of(call)[0]


def launches_of(call: Operands) -> list[Launch]:
    """A launch for each kernel, the fastest first, or for each of the tile whose launch parameters are tried.

    A tile has a kernel whose programs share no tiles, and one whose programs do, except for the widest tile.
    """
    (outputs, columns), of_blocks = call.weight.shape, by_blocks(call)
    product = of_blocks, call.x.device, call.x.shape[0], outputs, _launch.cdiv(columns, WIDTH.value)
    tried = tuple(tile for tile in TILES if _launch.is_tried(NAMES[of_blocks][tile]))
    return _by_time.__wrapped__(*product, tried) if tried else _by_time(*product, TILES)


@functools.lru_cache(4096)
def _by_time(
    of_blocks: bool, device: torch.device, tokens: int, outputs: int, steps: int, tiles: tuple[Tile, ...]
) -> list[Launch]:
    """A launch for each kernel of these tiles, the fastest first."""
    launches = []
    for tile in tiles:
        values = _launch.parameters(NAMES[of_blocks][tile], device, tokens)
        (_, number), costs = tile.number(tokens, outputs), costs_of(TurnCosts, values)
        schedules = fastest_schedules(number, steps, _launch.multiprocessors(device), costs)
        launches += [Launch(tile, values, schedule, time) for time, schedule in schedules.values() if time < math.inf]
    return sorted(launches, key=lambda launch: launch.time)


def _results(out: torch.Tensor, rows: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Describes out without the rows of the last tile, which has so many, and all of it.

    The last tile repeats rows of the tile before. Their sums may differ where programs share tiles, so one tile stores
    them.
    """
    box = [HALF.value, WIDTH.value], box_layout(128, 16)
    whole = TensorDescriptor.from_tensor(out, *box)
    if out.shape[0] <= rows:
        return whole, whole
    return TensorDescriptor.from_tensor(out[:-rows], *box), whole


def strides(scale: torch.Tensor) -> tuple[int, ...]:
    """From scale to scale: 0 where there is one scale."""
    return _strides(scale.shape, scale.stride())


@functools.lru_cache(1024)
def _strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))


# The layers of a step ask for the same shapes, and each call asks twice.
_group_of = functools.lru_cache(1024)(group_of)


def _groups(call: Operands) -> tuple[GroupShape, GroupShape]:
    """Those of the scales of x, and of the weight or of one of its experts."""
    shapes = call.weight.shape[-2:], call.weight_scale.shape[-2:]
    return _group_of(call.x.shape, call.x_scale.shape), _group_of(*shapes)


def by_blocks(call: Operands) -> bool:
    of_x, of_weight = _groups(call)
    # The scales of one token are those of whole columns as well.
    return of_x in (TOKEN_BLOCKS, GroupShape(WHOLE, TOKEN_BLOCKS.columns)) and of_weight == BLOCKS


def by_rows(call: Operands) -> bool:
    of_x, of_weight = _groups(call)
    return of_x.columns == of_weight.columns == WHOLE and {of_x.rows, of_weight.rows} <= {1, WHOLE}
