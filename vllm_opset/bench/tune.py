"""A search for launch parameters that measures all candidates on the benchmark cases of their op."""

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from vllm_opset import ops
from vllm_opset.bench.measure import dtype_of
from vllm_opset.bench.timing import time_call
from vllm_opset.kernel import Kernel, kernels_of
from vllm_opset.kernels.triton import _launch
from vllm_opset.ops.contract import Op, Sample

# A candidate is good enough for a size if it is at most this much slower than the best. Fewer entries mean fewer kernel
# variants to compile.
GOOD_ENOUGH = 1.02


@dataclass(frozen=True)
class Trial:
    """One candidate on one case. values: sorted (name, value). size: the number that decides the launch."""

    case: str
    size: int
    values: tuple[tuple[str, int], ...]
    seconds: float


def variant_of(launch: str) -> str | None:
    """The variant whose launch this is, by its name: of the op and the variant, after that of a scheme if it has one.

    None for a launch of all variants.
    """
    op = _launch.table()[launch]["op"]
    variants = kernels_of(op, elsewhere=True)["triton"].variants
    names = variants.by_name if variants else ()
    return next((name for name in names if f"_{launch}".endswith(f"_{op}_{name}")), None)


def cases(op: Op, kernel: Kernel, variant: str | None, device: str, dtype: torch.dtype) -> list[Sample]:
    """The benchmark cases with which a variant's launch is tuned: those that the kernel's table gives to the variant.

    If there are none, all cases that the variant can run; so is a variant tuned that another one replaces here. All
    cases for None.
    """
    samples = list(op.bench_samples(device, dtype_of(op, dtype)))
    if variant is None:
        return samples
    own, able = [], []
    for sample in samples:
        args, kwargs = kernel.prepared_call(*sample.make())
        call = kernel.variants.describe(*args, **kwargs)
        if kernel.variants.pick(call) == variant:
            own.append(sample)
        if variant in kernel.variants.able(call):
            able.append(sample)
    return own or able


def trials(launch: str, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Iterator[Trial]:
    """Time every candidate of a launch on every case that uses this launch."""
    op = ops.BY_NAME[_launch.table()[launch]["op"]]
    kernel, variant = kernels_of(op.name)["triton"], variant_of(launch)
    run = kernel.run if variant is None else functools.partial(kernel.run, variant=variant)
    for sample in cases(op, kernel, variant, device, dtype):
        call = sample.make()
        for values in _launch.candidates(launch):
            with _launch.trial(launch, values) as asked:
                seconds = time_call(run, call, device, kernel.prepared_call).median
            if not asked:
                break
            yield Trial(sample.name, asked[0], tuple(sorted(values.items())), seconds)


def entries(measured: list[Trial]) -> list[dict[str, int]]:
    """The fewest entries of launch.yaml that are good enough for every size."""
    slowness = _slowness(measured)
    groups: list[tuple[list[int], set]] = []
    for size in sorted(slowness):
        good = {values for values, factor in slowness[size].items() if factor <= GOOD_ENOUGH}
        good = good or {min(slowness[size], key=slowness[size].get)}
        if groups and groups[-1][1] & good:
            groups[-1] = groups[-1][0] + [size], groups[-1][1] & good
        else:
            groups.append(([size], good))
    best = [min(good, key=lambda v: sum(slowness[s][v] for s in sizes)) for sizes, good in groups]
    bounds = [{"up_to": _between(a[-1], b[0])} for (a, _), (b, _) in itertools.pairwise(groups)] + [{}]
    return [bound | dict(values) for bound, values in zip(bounds, best, strict=True)]


def _slowness(measured: list[Trial]) -> Mapping[int, Mapping[tuple, float]]:
    """For each size and candidate: its time over the best candidate's, in the worst case of that size."""
    fastest: dict[str, float] = {}
    for trial in measured:
        fastest[trial.case] = min(trial.seconds, fastest.get(trial.case, trial.seconds))
    slowness: dict[int, dict[tuple, float]] = {}
    for trial in measured:
        of_size = slowness.setdefault(trial.size, {})
        of_size[trial.values] = max(of_size.get(trial.values, 0.0), trial.seconds / fastest[trial.case])
    return slowness


def _between(low: int, high: int) -> int:
    """The power of two at or below the geometric mean, or the lower size if that one is larger."""
    return max(low, 1 << round((low * high) ** 0.5).bit_length() - 1)
