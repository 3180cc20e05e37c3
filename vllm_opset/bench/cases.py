"""The cases of a comparison of engines: which requests are asked together, and what is measured."""

import fnmatch
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import ClassVar, NamedTuple

import yaml

from vllm_opset.bench.figures import ACCEPTANCE, LATENCIES, RATE, Run

# The first token ids have special meanings in many vocabularies.
SPECIAL_IDS = 10
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}


class Request(NamedTuple):
    """prompt: token ids. max_tokens: to generate. sampling: further arguments of SamplingParams.

    arrival: seconds after the beginning of its round; None in a round whose requests are all asked at once.
    """

    prompt: list[int]
    max_tokens: int
    sampling: Mapping = GREEDY
    arrival: float | None = None


class Case(ABC):
    """What all kinds of cases have. A kind is a dataclass, and its fields are the row in cases.yaml and in records.

    KIND: its name, and a field that kinds after it in KINDS lack. LEGEND: what one must know to read its tables.
    prompt, output: the most tokens of one request.
    """

    KIND: ClassVar[str]
    LEGEND: ClassVar[str]
    prompt: int
    output: int

    @property
    @abstractmethod
    def name(self) -> str:
        """For tables. It tells cases apart."""

    @property
    @abstractmethod
    def requests(self) -> int:
        """The number of requests of one repetition."""

    @property
    def length(self) -> int:
        """The tokens of the longest request."""
        return self.prompt + self.output

    @property
    def is_greedy(self) -> bool:
        """Whether engines are compared by their tokens, too."""
        return False

    def matches(self, pattern: str) -> bool:
        """Whether the name or the kind matches a shell pattern."""
        return fnmatch.fnmatchcase(self.name, pattern) or fnmatch.fnmatchcase(self.KIND, pattern)

    @abstractmethod
    def lengths_at_once(self) -> list[int]:
        """The lengths of requests for which the KV cache has room at the same time."""

    @abstractmethod
    def rounds(self, vocab_size: int) -> list[list[Request]]:
        """The requests of one repetition, by rounds. The first wakes the engine, and the last has all tokens.

        Of three rounds, the second has one token for all prompts: its seconds are those to the first token.
        """

    @abstractmethod
    def metrics(self, runs: Sequence[Run]) -> dict[str, list[float]]:
        """The values of each run by metric: those of `figures.DIGITS`."""


@dataclass(frozen=True)
class Batch(Case):
    """batch: requests at a time. prompt, output: tokens of each. sampling: of SamplingParams; greedy if it is empty."""

    batch: int
    prompt: int
    output: int
    sampling: Mapping = field(default_factory=dict)

    KIND = "batch"
    LEGEND = (
        "A case is requests x prompt tokens / output tokens, greedy unless sampled. TTFT is the time until every "
        "request has its first token. TPOT is the rest of the time over the rest of the tokens."
    )

    @property
    def name(self) -> str:
        return f"{self.batch}x{self.prompt}/{self.output}{' sampled' if self.sampling else ''}"

    @property
    def requests(self) -> int:
        return self.batch

    @property
    def is_greedy(self) -> bool:
        return not self.sampling

    def lengths_at_once(self) -> list[int]:
        return [self.length] * self.batch

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random token ids, which are the same in every run and differ between requests."""
        draw = random.Random(self.name)
        return [_prompt(draw, self.prompt, vocab_size) for _ in range(self.batch)]

    def rounds(self, vocab_size: int) -> list[list[Request]]:
        """Three rounds: a lone prompt, one token for all prompts, and all tokens."""
        prompts, sampling = self.prompts(vocab_size), {**GREEDY, **self.sampling}
        # An engine's first step after it was stopped takes longer, so it answers one prompt first.
        asked = ((prompts[:1], 1), (prompts, 1), (prompts, self.output))
        return [[Request(prompt, tokens, sampling) for prompt in of_round] for of_round, tokens in asked]

    def metrics(self, runs: Sequence[Run]) -> dict[str, list[float]]:
        """For each run: seconds to the first token, milliseconds for each further one, output tokens per second.

        Then the mean acceptance length: the tokens that a step gives a request, which are accepted drafts and one more.
        """
        tokens = self.batch * self.output
        return {
            "TTFT, s": [run.ttft for run in runs],
            "TPOT, ms": [1e3 * (run.total - run.ttft) / (self.output - 1) for run in runs],
            RATE: [tokens / run.total for run in runs],
            ACCEPTANCE: [run.acceptance_length(self.batch, tokens) for run in runs],
        }


@dataclass(frozen=True)
class Trace(Case):
    """Requests of mixed lengths, all asked at once, of which the KV cache has room for half.

    The prompts have SHORTEST to `prompt` tokens, short ones more often. The answers have SHORTEST_ANSWER to `output`
    tokens. A third of the requests is greedy, a third is sampled, and a third is sampled with a seed of its own.
    """

    trace: int
    prompt: int
    output: int

    KIND = "trace"
    LEGEND = (
        "A trace sends requests of mixed lengths at once. Its name has the most prompt tokens / output tokens of one, "
        "and the KV cache has room for half of the requests."
    )
    SHORTEST = 16
    SHORTEST_ANSWER = 8

    @property
    def name(self) -> str:
        return self._drawn

    @property
    def _drawn(self) -> str:
        """The seed of all that is drawn. A case at a rate has the seed of its trace, and so its requests."""
        return f"trace of {self.trace}, up to {self.prompt}/{self.output}"

    @property
    def requests(self) -> int:
        return self.trace

    def lengths_at_once(self) -> list[int]:
        return [prompt + output for prompt, output in self._sizes()][: self.trace // 2]

    def rounds(self, vocab_size: int) -> list[list[Request]]:
        """Two rounds: a lone request, after which the engine is awake, and all."""
        draw = random.Random(self._drawn)
        kinds = (GREEDY, SAMPLED, None)
        requests = [
            Request(_prompt(draw, prompt, vocab_size), output, kinds[i % 3] or {**SAMPLED, "seed": i})
            for i, (prompt, output) in enumerate(self._sizes())
        ]
        return [[requests[0]._replace(max_tokens=1)], requests]

    def metrics(self, runs: Sequence[Run]) -> dict[str, list[float]]:
        """For each run: output tokens per second, and the mean acceptance length."""
        tokens = sum(output for _, output in self._sizes())
        return {
            RATE: [tokens / run.total for run in runs],
            ACCEPTANCE: [run.acceptance_length(self.trace, tokens) for run in runs],
        }

    def _sizes(self) -> list[tuple[int, int]]:
        """The tokens of each prompt and of its answer, which are the same in every run."""
        draw = random.Random(f"lengths of {self._drawn}")
        shortest, longest = math.log(self.SHORTEST), math.log(self.prompt)
        return [
            (round(math.exp(draw.uniform(shortest, longest))), draw.randint(self.SHORTEST_ANSWER, self.output))
            for _ in range(self.trace)
        ]


@dataclass(frozen=True)
class ArrivingTrace(Trace):
    """The requests of a trace, which arrive at a rate: so many per second, in a Poisson process.

    The arrivals, like the requests, are the same in every run, and at another rate they have the same pattern. The KV
    cache has room for all requests, up to MOST_AT_ONCE. Raises ValueError for a rate that is no number above 0.
    """

    rate: float

    KIND = "rate"
    LEGEND = (
        "Requests at a rate have mixed lengths and arrive in a Poisson process. The name of their case has their "
        "number, and the most prompt tokens / output tokens of one. Their TTFT, TPOT and ITL are of single requests: "
        "TTFT is from the arrival to the first token, TPOT is the mean time of a request's further tokens, and ITL is "
        "the time between two outputs of a request, which are tokens, or steps if tokens are drafted. Percentiles are "
        "over the requests of one run: with few of them, one or two decide the 99th. While an engine keeps up, the "
        "arrivals bound its output tokens per second."
    )
    # As many requests as vLLM runs at a time on most devices.
    MOST_AT_ONCE = 256

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf:
            raise ValueError(f"requests arrive at a rate above 0 per second, not {self.rate:g}")

    @property
    def name(self) -> str:
        return f"{self.trace} requests at {self.rate:.15g}/s, up to {self.prompt}/{self.output}"

    def lengths_at_once(self) -> list[int]:
        return [prompt + output for prompt, output in self._sizes()][: self.MOST_AT_ONCE]

    def arrivals(self) -> list[float]:
        """Seconds to each arrival, ascending. They are scaled: the last one is after requests / rate seconds."""
        draw = random.Random(f"arrivals of {self._drawn}")
        times = list(accumulate(draw.expovariate(1) for _ in range(self.trace)))
        return [time / times[-1] * self.trace / self.rate for time in times]

    def rounds(self, vocab_size: int) -> list[list[Request]]:
        """Two rounds: a lone request, after which the engine is awake, and all at their arrivals."""
        lone, requests = super().rounds(vocab_size)
        arriving = zip(requests, self.arrivals(), strict=True)
        return [lone, [request._replace(arrival=arrival) for request, arrival in arriving]]

    def metrics(self, runs: Sequence[Run]) -> dict[str, list[float]]:
        """For each run: its latencies, and the metrics of a trace."""
        return {name: [run.latencies[name] for run in runs] for name in LATENCIES} | super().metrics(runs)


# A row is of the first kind whose name is one of its fields.
KINDS: tuple[type[Case], ...] = (ArrivingTrace, Trace, Batch)


def from_row(row: Mapping) -> Case:
    """The case that a row of cases.yaml, or a record, describes."""
    return next(kind for kind in KINDS if kind.KIND in row)(**row)


def load(models: str) -> list[Case]:
    """The cases of cases.yaml for models of a sort: gpu or cpu."""
    return [*map(from_row, yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text())[models])]


def _prompt(draw: random.Random, length: int, vocab_size: int) -> list[int]:
    return draw.choices(range(SPECIAL_IDS, vocab_size), k=length)
