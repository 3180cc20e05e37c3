"""Launch parameters: plain data in launch.yaml, by launch, target and size of the call.

`vllm-opset tune` finds them offline by measuring; nothing is tuned while serving. A kernel asks once per call:

    parameters("rms_norm", x.device, num_rows)   ->   {"tile": 1024, "warps": 8}

The size of a call is a number that its work grows with, such as its number of rows. An entry serves sizes up to its
`up_to`.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import triton
import triton.language as tl
import yaml
from triton.compiler import CompiledKernel
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import cuda
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from vllm_opset import targets
from vllm_opset.kernels.triton import INTERPRETED, launched_for
from vllm_opset.targets import Target
from vllm_opset.variants import powers_up_to

Parameters = Mapping[str, float]
Entry = tuple[float, Parameters]  # the largest size that it serves, and the parameters

_trials: dict[str, tuple[Parameters, list[int]]] = {}
_warm_ups: list[bool] = []  # one for each `warming_up` that has begun and not ended


def parameters(launch: str, device: torch.device, size: int) -> Parameters:
    """The launch parameters for a call of this size."""
    if launch in _trials:
        values, sizes = _trials[launch]
        sizes.append(size)
        return values
    for up_to, values in entries(launch, device):
        if size <= up_to:
            return values
    raise LookupError(f"{launch} has no launch parameters for a size of {size}")


def bound(launch: str, device: torch.device, size: int) -> float:
    """The largest size that has the same launch parameters as this one."""
    return next(up_to for up_to, _ in entries(launch, device) if size <= up_to)


def is_tried(launch: str) -> bool:
    """Whether the launch parameters are those of a `trial`."""
    return launch in _trials


@functools.cache
def entries(launch: str, device: torch.device) -> tuple[Entry, ...]:
    """The entries for a device, by rising size."""
    rows = targets.nearest(target(device), table()[launch]["targets"])
    return tuple((row.pop("up_to", float("inf")), row) for row in map(dict, rows))


def warm_sizes(device: torch.device, largest: int) -> list[int]:
    """Sizes from 1 to the largest that reach all entries of all launches: powers of two, and bounds between them."""
    bounds = {bound for launch in table() for bound, _ in entries(launch, device) if bound < largest}
    return sorted({*powers_up_to(largest), *map(int, bounds)})


def target(device: torch.device) -> Target:
    """The target that kernels on a device are launched for."""
    return launched_for(targets.of(device.type))


# Triton fuses products and sums, by default until 3.10. No kernel needs that for its results: each keeps its
# contract fused, as on an H200, and not fused, as in the interpreter. All times were measured with it. What must be
# rounded once in any case is a tl.fma.
FUSION = {"enable_fp_fusion": True}


# The value of PDL with which a kernel allows the next launch before it waits.
LAUNCH_FIRST = tl.constexpr(2)


@functools.cache
def launch_options(device: torch.device) -> Mapping[str, bool]:
    """Launch arguments of every kernel that calls `pdl_wait(PDL)`: FUSION, and whether it may start early.

    It may be launched before its predecessor ends on NVIDIA GPUs from Hopper on (programmatic dependent launch), which
    hides the launch latency. Triton takes `launch_pdl` for NVIDIA GPUs alone.
    """
    found = target(device)
    if found.vendor != "nvidia":
        return {"PDL": False, **FUSION}
    enabled = not INTERPRETED and targets.PDL in found.features
    return {"PDL": enabled, "launch_pdl": enabled, **FUSION}


def early_launch_options(device: torch.device, num_rows: int, launch: str = "early_launch") -> Mapping[str, bool | int]:
    """`launch_options` of a kernel that allows the next launch before it waits, where that is faster.

    `pdl_wait` says what the next kernel may then read. launch: the entry of the launch table that says where it is
    faster.
    """
    early = bool(parameters(launch, device, num_rows)["early"])
    return _launch_first(device) if early else launch_options(device)


@functools.cache
def _launch_first(device: torch.device) -> Mapping[str, bool | int]:
    options = launch_options(device)
    return {**options, "PDL": LAUNCH_FIRST.value} if options["PDL"] else options


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """A GPU's number of them; in the interpreter a few, which are enough to split the keys of small batches."""
    return 4 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def registers(device: torch.device, most: int) -> Mapping[str, int]:
    """Launch arguments that limit the registers of a thread, where Triton can."""
    return {"maxnreg": most} if target(device).vendor == "nvidia" else {}


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Waits until the previous kernel has ended and its writes are visible, then allows the launch of the next kernel.

    With LAUNCH_FIRST it allows that launch before it waits. So the next kernel may load its weights while this one
    waits and runs.

    This is the first statement of a kernel, or follows its first loads. Before it, a kernel must not write, and may
    read only data that is older than the last kernel before it that waits first. That kernel and the kernels with
    LAUNCH_FIRST after it may still run.
    """
    if PDL == LAUNCH_FIRST:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    elif PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


# A key has a step's sizes, which its layers share. So most launches of a step are like one of its first layer.
MOST_KNOWN = 4096
_known: dict[tuple, tuple[CompiledKernel, tuple]] = {}
_RUN = JITFunction.run


def launch(kernel: JITFunction, grid: tuple[int, ...], *args, **constants) -> None:
    """`kernel[grid](*args, **constants)`, in less than half of its time where a launch like it was made before.

    Triton finds the compiled kernel anew each time, by all that it was specialised for. Here it is found by at least as
    much, in fewer steps, and launches itself. While JITFunction.run is replaced, as in `_precompile`, nothing is found.

    args: exactly the parameters that are no constants. So a place of the key always means the same parameter, and a
    kernel that is found takes the constants of its first launch.
    """
    if not isinstance(kernel, JITFunction) or JITFunction.run is not _RUN:
        kernel[grid](*args, **constants)
        return
    key = (kernel, driver.active.get_current_device(), *map(_seen, args), *constants, *constants.values())
    if found := _known.get(key):
        compiled, last = found
        compiled[(*grid, 1, 1)](*args, *last)
        return
    compiled = kernel[grid](*args, **constants)
    given, rest = kernel.params[: len(args)], kernel.params[len(args) :]
    # For AMD's GPUs Triton also specialises for sizes of tensors. An argument by name could be one that changes.
    if _on_nvidia(compiled) and all(parameter.is_constexpr for parameter in rest):
        unnamed = [parameter.name for parameter in given if parameter.is_constexpr]
        assert not unnamed, f"{kernel.__name__} takes {', '.join(unnamed)} by its name"
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[key] = compiled, tuple(constants.get(parameter.name, parameter.default) for parameter in rest)


def _seen(arg):
    """At least what Triton specialises a kernel for, of an argument. Of a number that is all, so it is kept."""
    if type(arg) is int or arg is None:
        return arg
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.data_ptr() % 16
    if isinstance(arg, TensorDescriptor):
        return arg.base.dtype, *arg.block_shape, arg.layout
    if isinstance(arg, tuple):
        return type(arg), *map(_seen, arg)
    return type(arg), arg


def _on_nvidia(compiled: CompiledKernel | None) -> bool:
    return isinstance(compiled, CompiledKernel) and compiled.metadata.target.backend == "cuda"


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below n; 0 for 0.

    triton.next_power_of_2 does the same, but takes 1.6 of the 25 microseconds of a launch, as kernels can call it too.
    """
    return 1 << (n - 1).bit_length() if n else 0


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up; see `next_power_of_2`."""
    return -(-a // b)


def candidates(launch: str) -> list[Parameters]:
    """All combinations of values that tuning tries."""
    values = table()[launch]["candidates"]
    return [dict(zip(values, combination, strict=True)) for combination in itertools.product(*values.values())]


@contextlib.contextmanager
def warming_up() -> Iterator[None]:
    """Inside the context, a call launches each kernel that other numbers of tokens may take, so that it is compiled."""
    _warm_ups.append(True)
    try:
        yield
    finally:
        _warm_ups.pop()


def is_warm_up() -> bool:
    return bool(_warm_ups)


@contextlib.contextmanager
def trial(launch: str, values: Parameters) -> Iterator[list[int]]:
    """Inside the context, the launch uses these values, for measuring. Yields the list of the sizes of its calls."""
    sizes: list[int] = []
    _trials[launch] = values, sizes
    try:
        yield sizes
    finally:
        del _trials[launch]


@functools.cache
def table() -> Mapping[str, Mapping]:
    """The contents of launch.yaml."""
    return yaml.safe_load(Path(__file__).with_name("launch.yaml").read_text())
