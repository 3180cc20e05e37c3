"""One row of a benchmark: one implementation of one op on one case, checked against the reference, then timed."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch

import torch

from vllm_opset.bench import peers
from vllm_opset.bench.ceilings import Ceilings
from vllm_opset.bench.draws import DRAWN, check_draws
from vllm_opset.bench.timing import time_call
from vllm_opset.kernel import REFERENCE, Kernel, kernels_of
from vllm_opset.ops.contract import Op, Sample
from vllm_opset.parity import check_sample

# A time is doubtful where half the distance between its quartiles is more than this share of it, or where it beats the
# floor by more than ceilings vary that are measured twice.
UNSTEADY, ABOVE_CEILING = 0.25, 1.1


@dataclass(frozen=True)
class Candidate:
    """What is timed: a kernel of this package (peer is False), or a peer, dressed as a kernel."""

    kernel: Kernel
    peer: bool


@dataclass(frozen=True)
class Result:
    """One measurement.

    seconds, spread: of one call. bytes, flops: from the contract's cost. floor: the seconds that the ceilings allow at
    best. check: None if the result agrees with the reference, else how it does not, or what a kernel of ours raised in
    its place. skipped: why what cannot do the case was not timed.
    """

    op: str
    case: str
    dtype: str
    implementation: str
    peer: bool
    reproduce: str
    bytes: int | None = None
    flops: int | None = None
    floor: float | None = None
    seconds: float | None = None
    spread: float | None = None
    check: str | None = None
    skipped: str | None = None

    @property
    def share(self) -> float | None:
        """Of the ceiling: 1 would be the floor."""
        return None if self.seconds is None else self.floor / self.seconds

    @property
    def doubt(self) -> str | None:
        """Why the time says little, or None."""
        if self.seconds is None:
            return None
        if self.spread > UNSTEADY * self.seconds:
            return "its time differs too much from call to call: repeat it while nothing else runs"
        if self.share > ABOVE_CEILING:
            return "it is faster than its floor: its operands were in a cache, or something slowed the ceilings down"
        return None


def candidates(op: Op, device: str, kernel_name: str | None, against: list[str]) -> Iterator[Candidate]:
    """The device's kernels of the op, and the peers that have it. The reference is one of them only where it serves."""
    for kernel in kernels_of(op.name).values():
        serves = kernel.provider != REFERENCE or device == "cpu"
        if kernel.runs_on(device) and kernel_name in ((None, kernel.name) if serves else (kernel.name,)):
            yield Candidate(kernel, peer=False)
    for name in against:
        if run := peers.implementation(name, op):
            yield Candidate(_as_kernel(op, name, run), peer=True)


def cases(op: Op, device: str, dtype: torch.dtype, pattern: str) -> list[Sample]:
    """The op's benchmark cases whose names match a shell pattern."""
    return [sample for sample in op.bench_samples(device, dtype) if fnmatch(sample.name, pattern)]


def dtype_of(op: Op, asked: torch.dtype) -> torch.dtype:
    """The dtype that is asked for, if the op's contract has it; else the contract's first."""
    return asked if asked in op.dtypes else op.dtypes[0]


def measure(
    op: Op, sample: Sample, candidate: Candidate, device: str, dtype: torch.dtype, ceilings: Ceilings
) -> Result:
    """Checks the candidate against the reference, then times it."""
    name = str(dtype).removeprefix("torch.")
    which = "--against" if candidate.peer else "--kernel"
    in_dtype = f" --dtype {name}" if dtype.is_floating_point else ""  # an op of integers has no other
    result = Result(
        op.name, sample.name, name, candidate.kernel.name, candidate.peer,
        f"vllm-opset bench {op.name} --case '{sample.name}'{in_dtype} {which} {candidate.kernel.name}",
    )  # fmt: skip
    verdict = None
    try:
        compare = check_draws if candidate.peer and op.name in DRAWN else check_sample
        check = compare(op, candidate.kernel, sample, dtype)
        if check.skipped:
            return dataclasses.replace(result, skipped=check.skipped)
        verdict = check.failure
        call = sample.make()
        timing = time_call(candidate.kernel.run, call, device, candidate.kernel.prepared_call)
    except Exception as error:
        if not candidate.peer and candidate.kernel.provider != REFERENCE:
            return dataclasses.replace(result, check=_first_line(verdict or f"raised {type(error).__name__}: {error}"))
        if not isinstance(error, (NotImplementedError, RuntimeError)):
            raise
        # It cannot do the case, or not in a CUDA graph.
        return dataclasses.replace(result, skipped=_first_line(str(error).strip() or type(error).__name__))
    cost = op.cost_of(*call[0], **call[1])
    return dataclasses.replace(
        result, bytes=cost.bytes, flops=cost.flops, floor=ceilings.floor(cost),
        seconds=timing.median, spread=timing.spread, check=verdict,
    )  # fmt: skip


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0]


def _as_kernel(op: Op, name: str, run: Callable) -> Kernel:
    return Kernel(op.name, name, name, (), lambda problem: None, run)
