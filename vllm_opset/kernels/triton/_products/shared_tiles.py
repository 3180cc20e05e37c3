"""Tiles of a product that several programs share: how many units each takes, and the sum of their sums."""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeVar

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vllm_opset.kernels.triton import _launch
from vllm_opset.kernels.triton._gluon import barrier

# From so many columns of sums on, a program looks at the counter before it stores its sums. For fewer, the look takes
# longer.
COLUMNS_OF_LARGE_SUMS = gl.constexpr(32)


class Costs(NamedTuple):
    """A program's times in nanoseconds. launch.yaml says of what."""

    start: float
    unit: float
    share: float
    piece: float
    crossing: float


@functools.cache
def fastest_run(tiles: int, tile_units: int, programs: int, costs: Costs) -> tuple[float, int]:
    """The shortest time in nanoseconds of programs that take equally many units, and how many units each one takes."""
    least, whole = _launch.cdiv(tiles * tile_units, programs), _launch.cdiv(tiles, programs) * tile_units
    return min((_time(tile_units, run, costs), run) for run in range(least, whole + 1))


def _time(tile_units: int, run: int, costs: Costs) -> float:
    pieces = most_pieces(tile_units, run)
    time = costs.start + costs.unit * run + _sharing(pieces, costs)
    if tile_units % run and run % tile_units:
        time += costs.crossing
    return time


def most_pieces(tile_units: int, run: int) -> int:
    """The most programs that share a tile."""
    return (run - math.gcd(run, tile_units) + tile_units - 1) // run + 1


class TurnCosts(NamedTuple):
    """A program's times in nanoseconds, where programs take tiles by turns. launch.yaml says of what."""

    start: float
    tile: float
    unit: float
    shared_unit: float
    share: float
    piece: float


class Schedule(NamedTuple):
    """How programs take tiles: whole ones by turns, and then each a part of one.

    programs: their number. whole: the number of tiles that no programs share, which come first. run: the units of each
    other tile that a program takes.
    """

    programs: int
    whole: int
    run: int


@functools.cache
def fastest_schedules(
    tiles: int, tile_units: int, programs: int, costs: TurnCosts
) -> dict[bool, tuple[float, Schedule]]:
    """The shortest times in nanoseconds and their schedules, by whether programs share tiles.

    programs: so many run at a time. Tiles of a single unit are not shared.
    """
    rounds = _launch.cdiv(tiles, programs)
    # As few programs as need no more rounds (docs/log/kernels.md has what that gains).
    all_whole = Schedule(_launch.cdiv(tiles, rounds), tiles, tile_units)
    found = {False: (costs.start + rounds * (costs.tile + costs.unit * tile_units), all_whole)}
    if tile_units > 1:
        found[True] = min(_shared(tiles, tile_units, programs, costs))
    return found


def _shared(tiles: int, tile_units: int, programs: int, costs: TurnCosts) -> Iterator[tuple[float, Schedule]]:
    """Times and schedules with shared tiles: those that are left after full rounds, or one if these are too many."""
    left = tiles % programs
    shared = left if 0 < 2 * left <= programs else 1
    rounds = _launch.cdiv(tiles - shared, programs)
    for pieces in range(2, min(programs // shared, tile_units) + 1):
        run = _launch.cdiv(tile_units, pieces)
        pieces = _launch.cdiv(tile_units, run)
        time = costs.start + (rounds + 1) * costs.tile + costs.shared_unit * (rounds * tile_units + run)
        used = programs if rounds else shared * pieces
        yield time + _sharing(pieces, costs), Schedule(used, tiles - shared, run)


Kind = TypeVar("Kind", Costs, TurnCosts)


def costs_of(kind: type[Kind], values: Mapping[str, float]) -> Kind:
    """The costs of a kind among launch parameters."""
    return kind(*(values[name] for name in kind._fields))


def _sharing(pieces: int, costs: Costs | TurnCosts) -> float:
    """The time that a program takes longer because so many programs share its tile."""
    return costs.share + costs.piece * (pieces - 1) if pieces > 1 else 0


@gluon.jit
def sums_of_tile(
    sums, partials, counters, tile, tile_units, run, INDEX: gl.constexpr = 0, WARPGROUPS: gl.constexpr = 1
):  # fmt: skip
    """Whether this is the only program of a tile or the last one, and the sums of all its programs in their order.

    Only the last program has the sums of all. The threads are WARPGROUPS parts with rows of their own. INDEX is the
    number of this part.
    sums: a tuple, those of this program. tile_units: units of columns in a tile. run: the units that a program takes.
    partials: room for two tiles of each program. counters: zero for each tile, and zero again afterwards.
    """
    PARTS: gl.constexpr = len(sums)
    SUMS: gl.constexpr = sums[0].type.layout
    LARGE: gl.constexpr = sums[0].shape[1] >= COLUMNS_OF_LARGE_SUMS
    program, first_unit, counter = gl.program_id(0), tile * tile_units, counters + tile * WARPGROUPS + INDEX
    first, last = first_unit // run, (first_unit + tile_units - 1) // run
    is_last = first == last
    if first != last:
        own = ()
        for part in gl.static_range(PARTS):
            own += (_by_thread(sums[part]),)
        if LARGE:  # If all others' sums are in memory, this program's own need not be.
            is_last = gl.atomic_add(counter, 0, sem="acquire") == last - first
        if not is_last:
            place = place_of(program, first_unit, run) * WARPGROUPS + INDEX
            for part in gl.static_range(PARTS):
                gl.store(partial_of(partials, own[part], place * PARTS + part), own[part])
            barrier()  # all threads' stores come before the count
            is_last = gl.atomic_add(counter, 1, sem="acq_rel") == last - first
        if is_last:
            gl.store(counter, 0)
            total = ()
            for part in gl.static_range(PARTS):
                total += (gl.zeros_like(own[part]),)
            for other in range(first, last + 1):
                place, added = place_of(other, first_unit, run) * WARPGROUPS + INDEX, ()
                for part in gl.static_range(PARTS):
                    pointers = partial_of(partials, own[part], place * PARTS + part)
                    if LARGE:
                        of_other = gl.load(pointers, other != program, cache_modifier=".cg")
                        of_other = gl.where(other == program, own[part], of_other)
                    else:
                        of_other = gl.load(pointers, cache_modifier=".cg")
                    added += (total[part] + of_other,)
                total = added
            sums = ()
            for part in gl.static_range(PARTS):
                sums += (gl.convert_layout(_by_place(total[part]), SUMS),)
    return is_last, sums


@gluon.jit
def _by_thread(sums):
    """The same elements in the order in which threads hold them: four of each thread, one thread after the other.

    So a warp stores and loads whole lines. A warp holds 16 rows of wgmma's results. In 8 rows of 8 columns, each of its
    threads holds two neighbours. Of a thread's four elements, those of one column come first. Stores of four elements
    say which registers hold sums. If those of one row came first, a product, its scale and its sum would often be in
    the same bank of registers, and adding them would take a cycle longer.
    """
    ROWS: gl.constexpr = sums.shape[0]
    COLUMNS: gl.constexpr = sums.shape[1]
    parts = sums.reshape([ROWS // 16, 2, 8, COLUMNS // 8, 4, 2])
    parts = parts.permute([3, 0, 2, 4, 5, 1]).reshape([COLUMNS // 8, ROWS * 8])
    return gl.convert_layout(parts, gl.BlockedLayout([1, 4], [1, 32], [1, gl.num_warps()], [1, 0]))


@gluon.jit
def _by_place(sums):
    """What `_by_thread` was given."""
    ROWS: gl.constexpr = sums.shape[1] // 8
    COLUMNS: gl.constexpr = sums.shape[0] * 8
    parts = sums.reshape([COLUMNS // 8, ROWS // 16, 8, 4, 2, 2])
    return parts.permute([1, 5, 2, 0, 3, 4]).reshape([ROWS, COLUMNS])


@gluon.jit
def place_of(program, first_unit, run):
    """Which of the places is for a program's sums of a tile. It shares only its first and its last tile with others.

    first_unit: of the tile.
    """
    return 2 * program + gl.where(first_unit > program * run, 1, 0)


@gluon.jit
def partial_of(partials, sums, place):
    """Pointers to sums by thread, as number `place`."""
    ROWS: gl.constexpr = sums.shape[0]
    COLUMNS: gl.constexpr = sums.shape[1]
    row = gl.arange(0, ROWS, gl.SliceLayout(1, sums.type.layout))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, sums.type.layout))
    return partials + place * (ROWS * COLUMNS) + (row[:, None] * COLUMNS + column[None, :])
