"""One row of a benchmark: one implementation of an op on one case, checked against the reference and then timed."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch

import torch

from vllm_opset.bench import peers
from vllm_opset.bench.ceilings import Ceilings
from vllm_opset.bench.sampling_check import SAMPLING_OPS, check_sampled_tokens
from vllm_opset.bench.timing import time_call
from vllm_opset.kernel import REFERENCE, Kernel, kernels_of
from vllm_opset.ops.contract import Op, Sample
from vllm_opset.parity import check_sample

# A time is doubtful if half the distance between its quartiles is more than this share of it. It is also doubtful if
# it beats the floor by more than two measurements of the same ceiling differ.
UNSTEADY, ABOVE_CEILING = 0.25, 1.1
# Peers raise these for a case that they cannot do: vLLM and PyTorch check shapes in all of these ways.
REFUSALS = (NotImplementedError, RuntimeError, AssertionError, ValueError)


@dataclass(frozen=True)
class Candidate:
    """An implementation to time: a kernel of this package (peer is False), or a peer wrapped as a kernel.

    variant: the variant of the kernel that runs the case, if it has variants and the case is known.
    """

    kernel: Kernel
    peer: bool
    variant: str | None = None


@dataclass(frozen=True)
class Peer(Kernel):
    """A peer wrapped as a kernel. convert: makes the arguments of `run` of those of the op, once; None if they are."""

    convert: Callable[..., tuple[tuple, dict]] | None = field(default=None, repr=False, compare=False)

    def prepared_call(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return (args, kwargs) if self.convert is None else self.convert(*args, **kwargs)


@dataclass(frozen=True)
class Result:
    """One measurement.

    seconds, spread: of one call. bytes, flops: from the contract's cost. floor: the least seconds by the ceilings.
    check: None if the result agrees with the reference; else the difference, or the exception of a kernel of ours.
    skipped: the reason, if an implementation cannot do the case and was not timed. variant: the kernel's, that ran it.
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
    variant: str | None = None

    @property
    def share(self) -> float | None:
        """The share of the ceiling that was reached: 1 means that the time equals the floor."""
        return None if self.seconds is None else self.floor / self.seconds

    @property
    def doubt(self) -> str | None:
        """Why the time is doubtful, or None."""
        if self.seconds is None:
            return None
        if self.spread > UNSTEADY * self.seconds:
            return "its time differs too much from call to call: repeat it while nothing else runs"
        if self.share > ABOVE_CEILING:
            return "it is faster than its floor: its operands were in a cache, or something slowed the ceilings down"
        return None


def candidates(op: Op, device: str, kernel_name: str | None, against: list[str]) -> Iterator[Candidate]:
    """The op's kernels for the device, and the peers with this op. The reference: on a CPU or if named.

    kernel_name: only the kernel of this name, or only its variant, as in triton:prefill.
    """
    wanted, colon, variant = (kernel_name or "").partition(":")
    for kernel in kernels_of(op.name).values():
        is_usual = kernel.provider != REFERENCE or device == "cpu"
        if kernel.runs_on(device) and (wanted == kernel.name or (is_usual and not wanted)):
            if not colon:
                yield Candidate(kernel, peer=False)
            elif kernel.variants and variant in kernel.variants.by_name:
                yield _with_variant(kernel, variant)
    for name in against:
        if run := peers.implementation(name, op):
            yield Candidate(_as_kernel(op, name, run), peer=True)


def by_variant(op: Op, candidate: Candidate, sample: Sample, others: bool) -> Iterator[Candidate]:
    """The candidate with the variant that runs the sample's call.

    others: whether to add the kernel's other variants that can run the call. A kernel that does not support the call,
    or has no variants, stays as it is.
    """
    kernel, call = candidate.kernel, sample.make()
    if kernel.variants is None or kernel.supports(op.problem_for(*call[0], **call[1])) is not None:
        yield candidate
        return
    args, kwargs = kernel.prepared_call(*call)
    described = kernel.variants.describe(*args, **kwargs)
    able = kernel.variants.able(described)
    if candidate.variant is None:
        chosen = kernel.variants.pick(described)
        yield dataclasses.replace(candidate, variant=chosen)
        if others:
            yield from (_with_variant(kernel, name) for name in able if name != chosen)
    elif candidate.variant in able:
        yield candidate
    else:
        unable = dataclasses.replace(kernel, supports=lambda problem: f"{candidate.variant} cannot run it")
        yield dataclasses.replace(candidate, kernel=unable)


def cases(op: Op, device: str, dtype: torch.dtype, pattern: str) -> list[Sample]:
    """The op's benchmark cases whose names match a shell pattern."""
    return [sample for sample in op.bench_samples(device, dtype) if fnmatch(sample.name, pattern)]


def dtype_of(op: Op, asked: torch.dtype) -> torch.dtype:
    """The requested dtype, if the op's contract has it; else the contract's first dtype."""
    return asked if asked in op.dtypes else op.dtypes[0]


def measure(
    op: Op, sample: Sample, candidate: Candidate, device: str, dtype: torch.dtype, ceilings: Ceilings
) -> Result:
    """Check the candidate against the reference, then time it."""
    name = str(dtype).removeprefix("torch.")
    which = "--against" if candidate.peer else "--kernel"
    in_dtype = f" --dtype {name}" if dtype.is_floating_point else ""  # an op of integers takes no --dtype
    result = Result(
        op.name, sample.name, name, candidate.kernel.name, candidate.peer,
        f"vllm-opset bench {op.name} --case '{sample.name}'{in_dtype} {which} {candidate.kernel.name}",
        variant=candidate.variant,
    )  # fmt: skip
    verdict = None
    try:
        compare = check_sampled_tokens if candidate.peer and op.name in SAMPLING_OPS else check_sample
        check = compare(op, candidate.kernel, sample, dtype)
        if check.skipped:
            return dataclasses.replace(result, skipped=check.skipped)
        verdict = check.failure
        call = sample.make()
        timing = time_call(candidate.kernel.run, call, device, candidate.kernel.prepared_call)
    except Exception as error:
        raised = f"raised {type(error).__name__}: {error}"
        if not candidate.peer and candidate.kernel.provider != REFERENCE:
            return dataclasses.replace(result, check=_first_line(verdict or raised))
        if isinstance(error, REFUSALS):  # It cannot do the case, or cannot do it in a CUDA graph.
            return dataclasses.replace(result, skipped=_first_line(str(error).strip() or type(error).__name__))
        if candidate.peer:  # The fault is not ours, and the run goes on.
            return dataclasses.replace(result, skipped=_first_line(raised))
        raise
    cost = op.cost_of(*call[0], **call[1])
    return dataclasses.replace(
        result, bytes=cost.bytes, flops=cost.flops, floor=ceilings.floor(cost),
        seconds=timing.median, spread=timing.spread, check=verdict,
    )  # fmt: skip


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0]


def _with_variant(kernel: Kernel, variant: str) -> Candidate:
    """The kernel as an override that asks for the variant runs it."""
    run = functools.partial(kernel.run, variant=variant)
    return Candidate(dataclasses.replace(kernel, name=f"{kernel.name}:{variant}", run=run), False, variant)


def _as_kernel(op: Op, name: str, run: Callable) -> Kernel:
    return Peer(op.name, name, name, (), lambda problem: None, run, convert=peers.preparation(name, op))
