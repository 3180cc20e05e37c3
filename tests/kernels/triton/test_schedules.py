"""How programs that take tiles by turns share the last ones, and when they do. It needs no GPU."""

import itertools

import pytest

from vllm_opset.kernels.triton._products.shared_tiles import Schedule, TurnCosts, fastest_schedules

PROGRAMS = 132


def _costs(**others: float) -> TurnCosts:
    return TurnCosts(**dict(start=5, tile=3, unit=1, shared_unit=1, share=2, piece=4) | others)


@pytest.mark.parametrize("piece", [0, 2, 100])
def test_programs_have_all_units_and_at_most_one_part_of_a_tile(piece):
    for tiles, units in itertools.product((1, 3, 64, 96, 132, 133, 196, 384, 500), (2, 7, 32, 96)):
        schedules = fastest_schedules(tiles, units, PROGRAMS, _costs(piece=piece))
        assert schedules[False][1].whole == tiles
        programs, whole, run = schedules[True][1]
        sharing = -(-units // run)
        assert sharing > 1 and run * (sharing - 1) < units <= run * sharing, "no program's part of a tile is empty"
        assert whole < tiles and (tiles - whole) * sharing <= programs <= PROGRAMS


def test_a_tile_of_one_unit_is_not_shared():
    assert list(fastest_schedules(40, 1, PROGRAMS, _costs())) == [False]


def test_the_time_of_a_schedule_is_that_of_its_longest_program():
    schedules = fastest_schedules(64, 32, PROGRAMS, _costs(shared_unit=2))
    assert schedules[False] == (5 + 3 + 32, Schedule(64, 64, 32))
    assert schedules[True] == (5 + 3 + 2 * 16 + 2 + 4, Schedule(128, 0, 16)), "two programs for each tile"
    schedules = fastest_schedules(300, 32, PROGRAMS, _costs())
    assert schedules[False] == (5 + 3 * (3 + 32), Schedule(100, 300, 32)), "as few programs as need no more rounds"
    assert schedules[True] == (5 + 3 * 3 + 2 * 32 + 11 + 2 + 2 * 4, Schedule(132, 264, 11)), "36 tiles"


@pytest.mark.parametrize("tiles", [67, 132, 200, 264])
def test_one_tile_is_shared_where_too_many_are_left(tiles):
    """So a warm-up compiles the kernel that shares tiles for any number of tokens."""
    time, schedule = fastest_schedules(tiles, 32, PROGRAMS, _costs())[True]
    assert schedule.whole == tiles - 1
    assert time > fastest_schedules(tiles, 32, PROGRAMS, _costs())[False][0]
