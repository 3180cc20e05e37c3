"""Random problems of an op, and how the kernel that serves compares with all others on them."""

import random
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch

import torch

from vllm_opset.bench.format import TIMES
from vllm_opset.bench.measure import Result
from vllm_opset.kernel import REFERENCE
from vllm_opset.ops.contract import Op, Sample
from vllm_opset.selection import PREFERENCE

QUANTILES = (0.1, 0.5, 0.9)
WORST = 10
FLOOR = "floor"
MICROSECOND = 1e-6


def random_cases(op: Op, device: str, dtype: torch.dtype, number: int, seed: int, pattern: str) -> list[Sample]:
    """Problems 0 to number - 1 that the op draws, if their names match. Problem i depends on i and the seed alone."""
    drawn = (op.draw(device, dtype, random.Random(f"{seed} {i}")) for i in range(number))
    named = [Sample(f"#{i} {sample.name}", sample.make, sample.scale) for i, sample in enumerate(drawn)]
    return [sample for sample in named if fnmatch(sample.name, pattern)]


@dataclass(frozen=True)
class KernelComparison:
    """A kernel beside another implementation, or beside the floor, on the cases that both did.

    ratios: by case, the other's time divided by the kernel's, so that more than 1 is faster. seconds: the kernel's.
    wrong: the number of the kernel's results that are further from the reference than allowed, of `checked`.
    kind: of the cases, if they are only those of one kind.
    """

    op: str
    kernel: str
    other: str
    ratios: dict[str, float]
    seconds: dict[str, float]
    wrong: int
    checked: int
    kind: str | None = None

    @property
    def geometric_mean(self) -> float:
        return statistics.geometric_mean(self.ratios.values())

    def quantile(self, share: float) -> float:
        """The ratio that this share of the cases does not exceed."""
        ordered = sorted(self.ratios.values())
        return ordered[round(share * (len(ordered) - 1))]

    def worst(self) -> list[str]:
        """The cases with the least ratios."""
        return sorted(self.ratios, key=self.ratios.get)[:WORST]

    def as_json(self) -> dict:
        names = {"op": self.op, "kernel": self.kernel, "other": self.other, "kind": self.kind}
        counts = {"cases": len(self.ratios), "wrong": self.wrong, "checked": self.checked}
        quantiles = {str(share): self.quantile(share) for share in (0, *QUANTILES, 1)}
        worst = {case: self.ratios[case] for case in self.worst()}
        return names | counts | {"geometric_mean": self.geometric_mean, "quantiles": quantiles, "worst": worst}


def kind_of(case: str) -> str | None:
    """The kind of a problem, by the name that `random_cases` gave it; None if it has none."""
    _, _, drawn = case.partition(" ")
    return drawn.split()[0] if drawn else None


def comparisons(results: Iterable[Result]) -> Iterator[KernelComparison]:
    """The first of opset's kernels, in the order of selection, beside each other implementation and the floor.

    A comparison on all cases comes first, then those on the cases of one kind, if there are several.
    """
    by_op: dict[str, dict[str, list[Result]]] = {}
    for result in results:
        by_op.setdefault(result.op, {}).setdefault(result.implementation, []).append(result)
    for op, found in by_op.items():
        kernel = _serving([name for name, own in found.items() if not own[0].peer])
        if kernel is not None:
            others = {FLOOR: {result.case: result.floor for result in found[kernel] if result.seconds is not None}}
            others |= {name: _seconds(own) for name, own in found.items() if name != kernel}
            for other, seconds in others.items():
                yield from _by_kind(op, found[kernel], other, seconds)


def _by_kind(op: str, ours: list[Result], other: str, seconds: Mapping[str, float]) -> Iterator[KernelComparison]:
    """Comparisons of a kernel with one other. ours: the kernel's results. seconds: the other's, by case."""
    timed = {result.case: result.seconds for result in ours if result.seconds is not None and result.case in seconds}
    kinds = list(dict.fromkeys(filter(None, map(kind_of, timed))))
    for kind in [None, *(kinds if len(kinds) > 1 else [])]:
        own = {case: of_case for case, of_case in timed.items() if kind in (None, kind_of(case))}
        if own:
            checked = [result for result in ours if not result.skipped and kind in (None, kind_of(result.case))]
            wrong = sum(result.check is not None for result in checked)
            ratios = {case: seconds[case] / of_case for case, of_case in own.items()}
            yield KernelComparison(op, ours[0].implementation, other, ratios, own, wrong, len(checked), kind)


def tables(results: Iterable[Result]) -> Iterator[tuple[str, list[str], list[dict]]]:
    """(title, columns, rows): a table of all comparisons of an op, and the worst cases of each on all kinds."""
    by_op: dict[str, list[KernelComparison]] = {}
    for comparison in comparisons(results):
        by_op.setdefault(comparison.op, []).append(comparison)
    for op, found in by_op.items():
        rows = [_row(comparison) for comparison in found]
        yield f"{op}, {found[0].kernel} beside others", list(rows[0]), rows
        for comparison in (one for one in found if one.kind is None):
            worst = [
                {
                    "case": case,
                    "µs": f"{comparison.seconds[case] / MICROSECOND:.1f}",
                    "speed-up": f"{comparison.ratios[case]:.2f}{TIMES}",
                }
                for case in comparison.worst()
            ]
            yield f"{op}, the worst of {comparison.kernel} beside {comparison.other}", list(worst[0]), worst


def _row(comparison: KernelComparison) -> dict[str, str]:
    quantiles = {f"{share:.0%}": f"{comparison.quantile(share):.2f}{TIMES}" for share in QUANTILES}
    return {
        "beside": comparison.other,
        "kind": comparison.kind or "all",
        "cases": str(len(comparison.ratios)),
        "wrong": f"{comparison.wrong} of {comparison.checked}",
        "geometric mean": f"{comparison.geometric_mean:.2f}{TIMES}",
        "least": f"{comparison.quantile(0):.2f}{TIMES}",
        **quantiles,
        "most": f"{comparison.quantile(1):.2f}{TIMES}",
    }


def _serving(names: list[str]) -> str | None:
    """The kernel among these that selection prefers; another kernel than the reference if there is one."""
    order = [*(provider for providers in PREFERENCE.values() for provider in providers), *names]
    return min((name for name in names if name != REFERENCE), key=order.index, default=None)


def _seconds(results: list[Result]) -> dict[str, float]:
    return {result.case: result.seconds for result in results if result.seconds is not None}
