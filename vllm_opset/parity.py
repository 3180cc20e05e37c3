"""Checks a kernel against its contract: every sample against the reference in fp64, and every property.

The same checks serve the test suite, `vllm-opset parity` and a kernel's author.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vllm_opset.kernel import Kernel
from vllm_opset.ops.contract import Op, Sample, Tolerance


@dataclass(frozen=True)
class Check:
    """One verdict. error: the largest share of the tolerance that was used up; over 1 fails. problem: why it failed."""

    op: str
    kernel: str
    dtype: torch.dtype
    case: str
    error: float | None
    failure: str | None
    skipped: str | None = None

    @property
    def passed(self) -> bool:
        return self.failure is None


def check_kernel(op: Op, kernel: Kernel, device: str) -> Iterator[Check]:
    """Every sample and property of the op, in every dtype. A sample that the kernel does not support is named skipped."""
    for dtype in op.dtypes:
        for sample in op.samples(device, dtype):
            yield check_sample(op, kernel, sample, dtype)
        for name in op.properties:
            yield check_property(op, kernel, name, device, dtype)


def check_sample(op: Op, kernel: Kernel, sample: Sample, dtype: torch.dtype) -> Check:
    """Runs kernel and reference on the sample's inputs and compares what they return and what they leave behind."""
    args, kwargs = sample.make()
    unsupported = kernel.supports(op.describe(*args, **kwargs))
    if unsupported:
        return Check(op.name, kernel.name, dtype, sample.name, None, None, skipped=unsupported)
    returned = kernel.run(*args, **kwargs)
    got = _outcome(op, args, kwargs, returned)
    error, failure = _compare(op, _expected(op, sample), got)
    failure = failure or _untouched(op, sample, args, kwargs)
    return Check(op.name, kernel.name, dtype, sample.name, error, failure)


def check_property(op: Op, kernel: Kernel, name: str, device: str, dtype: torch.dtype) -> Check:
    """Runs one law of the op against the kernel."""
    failure = None
    try:
        op.properties[name](kernel.run, device, dtype)
    except AssertionError as broken:
        failure = str(broken) or "the property does not hold"
    return Check(op.name, kernel.name, dtype, f"property: {name.replace('_', ' ')}", None, failure)


def _expected(op: Op, sample: Sample) -> dict[str, torch.Tensor]:
    """The reference's outcome on the same values in fp64."""
    args, kwargs = sample.make()
    args = tuple(_wide(arg) for arg in args)
    kwargs = {key: _wide(value) for key, value in kwargs.items()}
    return _outcome(op, args, kwargs, op.reference(*args, **kwargs))


def _wide(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(torch.float64) if is_float else value


def _outcome(op: Op, args: tuple, kwargs: Mapping, returned: Any) -> dict[str, torch.Tensor]:
    """What a call gave: the returned tensors, and the tensors it was to write in place."""
    returned = returned if isinstance(returned, tuple) else (returned,)
    outcome = {f"result {i}": value for i, value in enumerate(returned) if isinstance(value, torch.Tensor)}
    bound = op.signature.bind(*args, **kwargs).arguments
    return outcome | {name: bound[name] for name in op.mutates if bound.get(name) is not None}


def _compare(op: Op, expected: dict, got: dict) -> tuple[float, str | None]:
    if expected.keys() != got.keys():
        return float("inf"), f"gave {sorted(got)} where the reference gives {sorted(expected)}"
    worst = 0.0
    for name, want in expected.items():
        have = got[name]
        if want.shape != have.shape:
            return float("inf"), f"{name} has shape {tuple(have.shape)}, not {tuple(want.shape)}"
        if not have.is_floating_point():
            if not torch.equal(want, have):
                return float("inf"), f"{name} differs in {int((want != have).sum())} of {want.numel()} elements"
            continue
        worst = max(worst, _error(want, have, op.tolerances[have.dtype]))
    return worst, None if worst <= 1 else f"off by {worst:.2f} times the tolerance"


def _error(want: torch.Tensor, have: torch.Tensor, tolerance: Tolerance) -> float:
    """The largest deviation as a share of the tolerance. NaN and infinities must be where the reference has them."""
    want, have = want.to(torch.float64), have.to(torch.float64)
    same = (want == have) | (want.isnan() & have.isnan())
    share = (want - have).abs() / (tolerance.atol + tolerance.rtol * want.abs())
    share = torch.where(same, 0.0, share).nan_to_num(nan=float("inf"))
    return share.max().item() if share.numel() else 0.0


def _untouched(op: Op, sample: Sample, args: tuple, kwargs: Mapping) -> str | None:
    """Nothing may be written but the mutated tensors, and of those nothing outside the view that was passed."""
    fresh_args, fresh_kwargs = sample.make()
    fresh = op.signature.bind(*fresh_args, **fresh_kwargs).arguments
    used = op.signature.bind(*args, **kwargs).arguments
    for name in fresh:
        if isinstance(fresh[name], torch.Tensor) and not _same_storage(fresh[name], used[name], name in op.mutates):
            what = "outside the view it was given of" if name in op.mutates else "to its input"
            return f"wrote {what} {name}"
    return None


def _same_storage(before: torch.Tensor, after: torch.Tensor, but_view: bool) -> bool:
    before_bytes, after_bytes = _storage(before), _storage(after)
    if but_view:
        _view_in(before_bytes, before).zero_()
        _view_in(after_bytes, after).zero_()
    return torch.equal(before_bytes, after_bytes)


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all the bytes behind a view."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).clone()


def _view_in(raw: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    return raw.view(view.dtype).as_strided(view.shape, view.stride(), view.storage_offset())


def sample_cases(op: Op, device: str) -> Iterator[tuple[torch.dtype, Sample]]:
    """Every (dtype, sample) of an op, for parametrised tests."""
    return itertools.chain.from_iterable(
        ((dtype, sample) for sample in op.samples(device, dtype)) for dtype in op.dtypes
    )
