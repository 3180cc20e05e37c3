"""Launch parameters: the data in launch.yaml, the search for an entry, and the entries that tuning makes of times."""

import pytest
import torch
import triton

from vllm_opset import ops, targets
from vllm_opset.bench.tune import Trial, entries
from vllm_opset.kernel import kernels_of
from vllm_opset.kernels.triton import _launch, _rows
from vllm_opset.targets import Target, nearest

CPU = torch.device("cpu")


def test_the_table_is_sound():
    for launch, data in _launch.table().items():
        assert data["op"] in ops.BY_NAME
        for rows in data["targets"].values():
            bounds = [row.get("up_to", float("inf")) for row in rows]
            assert bounds == sorted(set(bounds)) and bounds[-1] == float("inf"), launch
            assert all(set(row) - {"up_to"} == set(data["candidates"]) for row in rows), launch


@pytest.mark.parametrize(("target", "most"), [("nvidia/sm90", 32), ("amd/gfx942", 16), ("amd/gfx950", 16)])
def test_no_program_has_more_threads_than_a_gpu_allows(target, most):
    """1,024 threads, which are 32 warps of an NVIDIA GPU and 16 of an AMD GPU."""
    for launch, data in _launch.table().items():
        for row in nearest(Target(*target.split("/")), data["targets"]):
            assert max(row.get("warps", 1), row.get("row_warps", 1)) <= most, launch


@pytest.mark.parametrize(("target", "warps"), [("nvidia/sm90", 32), ("amd/gfx942", 16), ("amd/gfx1100", 32)])
def test_the_longest_rows_get_as_many_threads_as_a_gpu_allows(target, warps):
    with targets.instead(Target(*target.split("/"))):
        assert _rows.enough_warps(1, _rows.MAX_COLUMNS) == warps
        assert _rows.enough_warps(4, 64) == 4


@pytest.mark.parametrize(
    ("op", "sizes"),
    [("rms_norm", {"hidden_size": 1}), ("rms_norm_gated", {"hidden_size": 2, "group_size": 1})],
    ids=["rows", "groups of half a row"],
)
def test_what_registers_cannot_hold_is_refused(op, sizes):
    """sizes: of the problem, as multiples of what they can hold."""
    supports, problem = kernels_of(op, elsewhere=True)["triton"].supports, ops.BY_NAME[op].problem
    of = {"device": "cuda", "dtype": torch.bfloat16, "weight_dtype": torch.bfloat16}
    fits, too_long = (
        problem(**of, **{name: times * most for name, times in sizes.items()})
        for most in (_rows.MAX_COLUMNS, _rows.MAX_COLUMNS + 1)
    )
    assert supports(fits) is None and f"up to {_rows.MAX_COLUMNS} elements" in supports(too_long)


@pytest.mark.parametrize("target", ["nvidia/sm80", "nvidia/sm90", "nvidia/sm120", "amd/gfx942"])
def test_a_warm_up_reaches_all_parameters(target):
    largest = 20_000
    with targets.instead(Target(*target.split("/"))):
        _launch.entries.cache_clear()
        warm = _launch.warm_sizes(CPU, largest)
        for launch in _launch.table():
            served = [_launch.parameters(launch, CPU, size) for size in range(1, largest, 7)]
            reached = [_launch.parameters(launch, CPU, size) for size in warm]
            assert all(values in reached for values in served), launch
    _launch.entries.cache_clear()
    assert warm[0] == 1 and warm[-1] == largest


def test_a_bound_belongs_to_its_entry():
    first, second = (values for _, values in _launch.entries("rms_norm", CPU))
    bound = int(_launch.entries("rms_norm", CPU)[0][0])
    assert _launch.parameters("rms_norm", CPU, bound) == first
    assert _launch.parameters("rms_norm", CPU, bound + 1) == second


@pytest.mark.parametrize(
    ("target", "used"),
    [
        ("nvidia/sm90", "nvidia/sm90"),
        ("nvidia/sm100", "nvidia/sm90"),
        ("nvidia/sm89", "nvidia/sm80"),
        ("nvidia/sm75", "nvidia/sm80"),
        ("nvidia/sm121", "nvidia/sm120"),
        ("amd/gfx90a", "nvidia/sm80"),
        ("amd/gfx950", "amd/gfx942"),
    ],
)
def test_a_target_without_entries_is_served_with_the_vendors_nearest_older_ones(target, used, monkeypatch):
    names = ("nvidia/sm80", "nvidia/sm90", "nvidia/sm120", "amd/gfx942")
    monkeypatch.setattr(_launch, "table", lambda: {"mine": {"targets": {name: [{"name": name}] for name in names}}})
    _launch.entries.cache_clear()
    with targets.instead(Target(*target.split("/"))):
        assert _launch.parameters("mine", CPU, 1) == {"name": used}
    _launch.entries.cache_clear()


@pytest.mark.parametrize(
    ("launch", "waiting", "launching"),
    [
        ("early_launch", (1, 65), (2, 64)),
        ("quantised_early_launch", (65,), (1, 64)),
        ("norm_quant_early_launch", (65,), (1, 64)),
        ("groups_norm_quant_early_launch", (1, 64, 65), ()),
        ("quantise_early_launch", (257,), (1, 256)),
        ("rotary_early_launch", (64, 257), (65, 256)),
    ],
)
@pytest.mark.parametrize(
    ("target", "waits", "launches"), [("nvidia/sm90", 1, 2), ("nvidia/sm80", 0, 0), ("amd/gfx942", 0, 0)]
)
def test_the_next_kernel_is_launched_early_where_that_was_faster(
    target, waits, launches, launch, waiting, launching, monkeypatch
):
    """PDL: 0 where the GPU has no programmatic dependent launch, 1 to wait first, and 2 to launch first."""
    cached = (_launch.launch_options, _launch._launch_first, _launch.entries)
    monkeypatch.setattr(_launch, "INTERPRETED", False)
    with targets.instead(Target(*target.split("/"))):
        for function in cached:
            function.cache_clear()
        options = {rows: _launch.early_launch_options(CPU, rows, launch) for rows in (*waiting, *launching)}
    for function in cached:
        function.cache_clear()
    assert {int(options[rows]["PDL"]) for rows in waiting} == {waits}
    assert {int(options[rows]["PDL"]) for rows in launching} <= {launches}
    assert all(each.get("launch_pdl", False) == (waits == 1) for each in options.values())


@pytest.mark.parametrize(
    ("group", "of_norm"), [([1, -1], "norm_quant_early_launch"), ([1, 128], "groups_norm_quant_early_launch")]
)
def test_kernels_that_quantise_ask_by_rows_whether_to_launch_early(group, of_norm, monkeypatch):
    """Norms by rows and by parts of rows differ in whether it pays."""
    asked = []
    monkeypatch.setattr(_launch, "early_launch_options", lambda _, rows, launch: asked.append((rows, launch)) or {})
    monkeypatch.setattr(_launch, "launch", lambda *_, **__: None)
    x = torch.zeros(3, 256, dtype=torch.bfloat16)
    kernels_of("quantise")["triton"].run(x, torch.float8_e4m3fn, group)
    kernels_of("rms_norm_quant")["triton"].run(x, None, 1e-6, torch.float8_e4m3fn, group)
    assert asked == [(3, "quantise_early_launch"), (3, of_norm)]


def test_tuning_keeps_as_few_entries_as_serve_every_size_well():
    microseconds = {  # size: {tile: time}
        1: {512: 1.0, 1024: 1.3, 2048: 1.5},
        64: {512: 2.0, 1024: 2.01, 2048: 3.0},
        256: {512: 6.0, 1024: 5.0, 2048: 5.02},
        4096: {512: 99.0, 1024: 71.0, 2048: 70.0},
    }
    trials = [
        Trial(str(size), size, (("tile", tile),), time)
        for size, times in microseconds.items()
        for tile, time in times.items()
    ]
    assert entries(trials) == [{"up_to": 128, "tile": 512}, {"tile": 2048}]


@pytest.mark.parametrize(("low", "high", "up_to"), [(1, 2, 1), (64, 256, 128), (1025, 1030, 1025), (20, 30, 20)])
def test_a_bound_serves_the_lower_size_and_not_the_higher(low, high, up_to):
    trials = [
        Trial(str(size), size, (("tile", tile),), time)
        for size, times in ((low, (1.0, 2.0)), (high, (2.0, 1.0)))
        for tile, time in zip((512, 1024), times, strict=True)
    ]
    assert entries(trials) == [{"up_to": up_to, "tile": 512}, {"tile": 1024}]


def test_an_entry_must_suit_every_case_of_its_size():
    trials = [
        Trial(case, 4096, (("tile", tile),), time)
        for case, times in {"narrow": (1.0, 1.5), "wide": (3.0, 2.5)}.items()
        for tile, time in zip((512, 1024), times, strict=True)
    ]
    assert entries(trials) == [{"tile": 512}]


def test_integers_are_rounded_as_triton_does():
    numbers = [*range(70), 4095, 4096, 4097, 151936]
    assert [*map(_launch.next_power_of_2, numbers)] == [*map(triton.next_power_of_2, numbers)]
    assert all(_launch.cdiv(n, m) == triton.cdiv(n, m) for n in numbers for m in (1, 2, 7, 4096))
