"""The figures of a comparison of engines: what a repetition of a case takes, and the latencies of its requests."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

RATE, ACCEPTANCE = "output tokens/s", "mean acceptance length"
LATENCIES = ("TTFT p50, ms", "TTFT p99, ms", "TPOT p50, ms", "TPOT p99, ms", "ITL p99, ms")
# The digits of each metric after the point in tables.
DIGITS = {"TTFT, s": 4, "TPOT, ms": 3, RATE: 0, ACCEPTANCE: 2} | dict.fromkeys(LATENCIES, 2)


@dataclass(frozen=True)
class Run:
    """One repetition of a case. total: seconds until all tokens are there.

    ttft: seconds until every request has one token, None where that is not measured. compiled: the Triton kernels that
    were compiled, or loaded from Triton's cache, during it. steps: those that gave a request tokens, summed over
    the requests. latencies: by LATENCIES, of requests that arrive one after the other.
    """

    ttft: float | None
    total: float
    compiled: list[str]
    steps: int
    latencies: Mapping[str, float] = field(default_factory=dict)

    def acceptance_length(self, requests: int, tokens: int) -> float:
        """The tokens that a request got from a step, after its first token. It is 1 without drafts."""
        return (tokens - requests) / (self.steps - requests)


def latencies(tokens: Sequence[Sequence[int]], times: Sequence[Sequence[float]]) -> dict[str, float]:
    """LATENCIES by name, with the definitions of `vllm bench serve`. Percentiles interpolate linearly.

    tokens: of each request, at least two. times: seconds from its arrival to each of its outputs.
    """
    first = [of_one[0] for of_one in times]
    further = [(at[-1] - at[0]) / (len(of_one) - 1) for of_one, at in zip(tokens, times, strict=True)]
    between = [after - before for of_one in times for before, after in pairwise(of_one)]
    found = (_percentile(first, 50), _percentile(first, 99), _percentile(further, 50), _percentile(further, 99))
    return dict(zip(LATENCIES, (1e3 * seconds for seconds in (*found, _percentile(between, 99))), strict=True))


def _percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
