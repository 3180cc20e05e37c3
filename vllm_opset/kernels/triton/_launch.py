"""Launch parameters: plain data in launch.yaml, by kernel, GPU family and size of the call.

They are found offline, by measuring; nothing is tuned while serving. A kernel asks once per call:

    parameters("rms_norm", x.device, num_rows)   ->   {"tile": 1024, "per_thread": 8}

A size is what the work of a call grows with, such as its number of rows. Sizes share an entry up to its `up_to`, and
`sizes("rms_norm", device)` names one of each entry, so that a warm-up compiles every variant before the first request.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import yaml

Parameters = Mapping[str, int]

_trials: dict[str, Parameters] = {}


def parameters(kernel: str, device: torch.device, size: int) -> Parameters:
    """The launch parameters of a kernel for a call of this size."""
    if kernel in _trials:
        return _trials[kernel]
    return next(values for up_to, values in _entries(kernel, device) if size <= up_to)


def sizes(kernel: str, device: torch.device) -> tuple[int, ...]:
    """A size for each entry of a kernel: a call with each of them compiles all that serving can ask for."""
    bounds = [up_to for up_to, _ in _entries(kernel, device)]
    return (*map(int, bounds[:-1]), int(bounds[-2]) + 1 if len(bounds) > 1 else 1)


def family_used(kernel: str, device: torch.device) -> str:
    """The GPU family whose entries a device is served with: its own, or the nearest older one, or the oldest."""
    known = sorted(table()[kernel], key=_generation)
    not_newer = [name for name in known if _generation(name) <= _generation(family(device))]
    return not_newer[-1] if not_newer else known[0]


@functools.cache
def family(device: torch.device) -> str:
    """The GPU family of a device, such as "sm90" for Hopper; in the interpreter, the one that is to be proven there."""
    if device.type == "cpu":
        return "sm90"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


@functools.cache
def table() -> Mapping[str, Mapping[str, list[dict]]]:
    """launch.yaml: kernel -> family -> entries by rising `up_to`."""
    return yaml.safe_load(Path(__file__).with_name("launch.yaml").read_text())


@contextlib.contextmanager
def trial(kernel: str, values: Parameters) -> Iterator[None]:
    """Within it, `kernel` is launched with these values: for measuring."""
    _trials[kernel] = values
    try:
        yield
    finally:
        del _trials[kernel]


@functools.cache
def _entries(kernel: str, device: torch.device) -> tuple[tuple[float, Parameters], ...]:
    entries = table()[kernel][family_used(kernel, device)]
    return tuple((entry.pop("up_to", float("inf")), entry) for entry in map(dict, entries))


def _generation(name: str) -> int:
    return int(name.removeprefix("sm"))
