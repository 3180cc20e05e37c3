"""Timing of one call of an operator, with cold caches: on a GPU by replayed CUDA graphs, on a CPU by the clock.

Each call of a round has its own inputs, and on a GPU its own outputs. Other memory, more than the last-level cache, is
read before each round. So no call finds its operands in a cache.
"""

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

ROUNDS = 21  # replays whose times are compared
MAX_CALLS = 256  # in one replay
FEW_CALLS = 8  # in the replay that tells how long a call takes
ROUND_SECONDS = 1e-3  # the length of a replay: events have a resolution of half a microsecond
MEMORY_SHARE = 0.2  # of the device's free memory, for operands
CPU_SECONDS = 0.5  # for one case
CPU_SWEEP_BYTES = 256 << 20  # many times a CPU's caches, and read in some ten milliseconds
SWEEP_BYTES = 1 << 30  # larger than any cache, and takes long enough to hide the launch of a replay

# The driver zeroes freed memory in the background, which takes a tenth of the speed from other work. 52 GB slowed an
# H200 for a tenth of a second. This constant is a third of that rate, to be safe.
ZEROED_BYTES_PER_SECOND = 170e9

Call = tuple[tuple, dict]


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of the rounds, and half the distance between their quartiles."""

    median: float
    spread: float


def as_it_is(args: tuple, kwargs: dict) -> Call:
    return args, kwargs


def time_call(run: Callable, call: Call, device: str, prepare: Callable[..., Call] = as_it_is) -> Timing:
    """Time `run(*args, **kwargs)` on the device, for inputs like `call`, which `run` may mutate.

    prepare: converts the arguments before the call; its time does not count.
    Raises RuntimeError if the call cannot be captured in a CUDA graph. Such a call is of no use where speed matters.
    """
    return _time_cuda(run, call, prepare) if device == "cuda" else _time_cpu(run, call, prepare)


def _time_cuda(run: Callable, call: Call, prepare: Callable) -> Timing:
    _make_room()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        args, kwargs = prepare(*call)
        run(*args, **kwargs)  # compiles
        sweep = torch.zeros(SWEEP_BYTES // 4, dtype=torch.int32, device="cuda")
        # Not timed outside of a graph: there the host may take longer than the GPU. The start of a replay takes time,
        # so its share would then depend on the host.
        few = _replayed(run, _copies(run, call, prepare, FEW_CALLS), sweep, rounds=2)
        limit = min(MAX_CALLS, round(ROUND_SECONDS / few.median))
        return _replayed(run, _copies(run, call, prepare, limit), sweep, ROUNDS)


def _make_room() -> None:
    """Free the memory of earlier graphs, if it is much: PyTorch would keep it for graphs that never come."""
    free, total = torch.cuda.mem_get_info()
    if free < total / 2:
        torch.cuda.empty_cache()
        given_back = torch.cuda.mem_get_info()[0] - free  # other processes may have taken some of it
        time.sleep(max(0, given_back) / ZEROED_BYTES_PER_SECOND)


def _replayed(run: Callable, calls: list[Call], sweep: torch.Tensor, rounds: int) -> Timing:
    """Time a call in replays of a graph of all these calls. One replay more comes first and does not count."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    try:
        outputs = [run(*args, **kwargs) for args, kwargs in calls]  # kept, so that no two calls share an output
    finally:
        graph.capture_end()
    events = [_replay(graph, sweep) for _ in range(rounds + 1)][1:]
    torch.cuda.synchronize()
    del outputs
    return _summary([start.elapsed_time(end) / 1e3 / len(calls) for start, end in events])


def _replay(graph: torch.cuda.CUDAGraph, sweep: torch.Tensor) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    sweep.amax()
    start.record()
    graph.replay()
    end.record()
    return start, end


def _time_cpu(run: Callable, call: Call, prepare: Callable) -> Timing:
    calls = _copies(run, call, prepare, limit=MAX_CALLS)
    sweep = torch.ones(CPU_SWEEP_BYTES // 4, dtype=torch.int32)  # zeros may all be one page of memory
    seconds, deadline = [], time.perf_counter() + CPU_SECONDS
    while time.perf_counter() < deadline or len(seconds) < 3:
        args, kwargs = calls[len(seconds) % len(calls)]
        if len(seconds) % len(calls) == 0:
            sweep.amax()
        start = time.perf_counter()
        run(*args, **kwargs)
        seconds.append(time.perf_counter() - start)
    return _summary(seconds)


def _copies(run: Callable, call: Call, prepare: Callable, limit: int) -> list[Call]:
    """At least two copies of the inputs. The limit, and memory for inputs and outputs, bound their number."""
    args, kwargs = prepare(*call)
    operands = (call, run(*args, **kwargs))
    size = sum({s.data_ptr(): s.nbytes() for s in map(torch.Tensor.untyped_storage, _tensors(operands))}.values())
    fitting = int(MEMORY_SHARE * _free_memory(call)) // max(1, size)
    return [prepare(*copy.deepcopy(call)) for _ in range(max(2, min(limit, fitting)))]


def _free_memory(call: Call) -> int:
    if any(tensor.is_cuda for tensor in _tensors(call)):
        return torch.cuda.mem_get_info()[0]
    return SWEEP_BYTES  # a CPU's memory is shared with all other processes


def _tensors(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _summary(seconds: list[float]) -> Timing:
    quartiles = statistics.quantiles(seconds, n=4)
    return Timing(statistics.median(seconds), (quartiles[2] - quartiles[0]) / 2)
