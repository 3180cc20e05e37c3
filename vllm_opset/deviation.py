"""The deviation of a kernel's results from the reference's, with the index of the worst element.

The description is like that of `torch.testing.assert_close`: the number of mismatched elements, the index of the worst
one, both values, their absolute difference and the allowed difference.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from vllm_opset.ops.contract import Tolerance


@dataclass(frozen=True)
class Deviation:
    """The worst element of one result.

    share: its deviation divided by the tolerance there; 0 if all elements are equal. describe: one line with all that a
    kernel's author needs to find it.
    """

    share: float
    describe: Callable[[], str]


def worst(deviations: Iterable[Deviation]) -> Deviation:
    """The deviation with the largest share; 0 if there are no results."""
    return max(deviations, key=lambda deviation: deviation.share, default=Deviation(0.0, lambda: "there is no result"))


def deviation(
    name: str, have: torch.Tensor, want: torch.Tensor, tolerances: Mapping[torch.dtype, Tolerance]
) -> Deviation:
    """The deviation of the kernel's tensor `have` from the reference's `want`. Both have the same shape and device.

    tolerances: by the dtype of `have`, with the scale of the sample. Integers without one must be equal.
    """
    if not have.is_floating_point() and have.dtype not in tolerances:
        return _of_integers(name, have, want)
    tolerance = tolerances[have.dtype]
    allowed = tolerance.atol + tolerance.rtol * want.abs()
    difference = (want - have.to(want.dtype)).abs()
    share = torch.where(_same(have, want), 0.0, difference / allowed).nan_to_num(nan=float("inf"))

    def describe() -> str:
        index = _index_of_largest(share)
        return (
            f"{name} is off by {share[index].item():.2f} times the tolerance: {_count(share > 1)} mismatch; the worst, "
            f"at index {index}, is {have[index].item():g} where the reference gives {want[index].item():g}: "
            f"absolute difference {difference[index].item():.3g}, allowed {allowed[index].item():.3g} "
            f"(atol {tolerance.atol:.3g} + rtol {tolerance.rtol:.3g} * |reference|)"
        )

    return Deviation(share.max().item() if share.numel() else 0.0, describe)


def _of_integers(name: str, have: torch.Tensor, want: torch.Tensor) -> Deviation:
    different = have != want

    def describe() -> str:
        index = _index_of_largest(different.int())
        return (
            f"{name} must equal the reference's: {_count(different)} mismatch; the first, at index {index}, is "
            f"{have[index].item()} where the reference gives {want[index].item()}"
        )

    return Deviation(float("inf") if different.any() else 0.0, describe)


def _same(have: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """True where both are NaN, or equal in the kernel's dtype: by contract, values that overflow it become infinite."""
    rounded = want.to(have.dtype) if have.is_floating_point() else want.round().to(have.dtype)
    return (rounded == have) | (want.isnan() & have.isnan())


def _index_of_largest(values: torch.Tensor) -> tuple[int, ...]:
    """The index of the largest element; if there are several, of the first."""
    return tuple(int(i) for i in torch.unravel_index(values.argmax(), values.shape))


def _count(mismatched: torch.Tensor) -> str:
    count, total = int(mismatched.sum()), mismatched.numel()
    return f"{count} of {total} elements ({count / total:.1%})"
