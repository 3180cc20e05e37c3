"""What `vllm-opset bench` measures: cases and implementations, and their calls ahead of the measurement."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from vllm_opset import ops
from vllm_opset.bench.measure import Candidate, by_variant, candidates, cases, dtype_of
from vllm_opset.bench.random_cases import random_cases
from vllm_opset.kernel import REFERENCE
from vllm_opset.ops.contract import Op, Sample

Work = tuple[Op, Sample, Candidate]


@dataclass(frozen=True)
class Plan:
    """What to measure, by names, so that another process can be told.

    kernel: only this one, or one of its variants. against: peers. pattern: of the cases. drawn: the number of random
    problems and their seed, or None for the benchmark cases of the contracts.
    """

    ops: tuple[str, ...]
    device: str
    dtype: torch.dtype
    kernel: str | None
    against: tuple[str, ...]
    pattern: str
    drawn: Mapping[str, int] | None

    def work(self) -> list[Work]:
        """All measurements to make, before variants are known. Measurements of one case are next to each other."""
        work = []
        for op in (ops.BY_NAME[name] for name in self.ops):
            implementations = self._implementations(op)
            work += [(op, sample, candidate) for sample in self._samples(op) for candidate in implementations]
        return work

    def variants(self, op: Op, sample: Sample, candidate: Candidate) -> Iterator[Candidate]:
        """The candidate with the variant that runs the sample, and with others unless one was named."""
        return by_variant(op, candidate, sample, others=self.kernel is None and self.drawn is None)

    def call_ahead(self, first: int, step: int) -> list[str]:
        """Call every `step`-th measurement once, from number `first` on. Returns the exceptions that were raised.

        It leaves compiled kernels in the caches on disk, so that processes with other numbers share the work.
        """
        failures = []
        for op, sample, candidate in self.work()[first::step]:
            try:
                for one in self.variants(op, sample, candidate):
                    args, kwargs = sample.make()
                    if one.kernel.supports(op.problem_for(*args, **kwargs)) is None:
                        one.kernel.call(*args, **kwargs)
                _settle(self.device)
            except Exception as error:  # the measurement will raise it again, and say what it means
                failures.append(f"{op.name}, {candidate.kernel.name}, {sample.name}: {error}")
        return failures

    def _implementations(self, op: Op) -> list[Candidate]:
        found = candidates(op, self.device, self.kernel, list(self.against))
        if self.drawn is None or self.kernel is not None:
            return list(found)
        # Many problems are measured: the reference would take most of the time.
        return [candidate for candidate in found if candidate.kernel.provider != REFERENCE]

    def _samples(self, op: Op) -> list[Sample]:
        dtype = dtype_of(op, self.dtype)
        if self.drawn is None:
            return cases(op, self.device, dtype, self.pattern)
        return random_cases(op, self.device, dtype, self.drawn["number"], self.drawn["seed"], self.pattern)


def _settle(device: str) -> None:
    """Wait for the device, and leave its memory to other processes."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
