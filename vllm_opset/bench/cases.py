"""The cases of a comparison of engines: which requests are asked together, and what is measured."""

import fnmatch
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple

import yaml

# The first token ids have special meanings in many vocabularies.
SPECIAL_IDS = 10
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}


class Request(NamedTuple):
    """prompt: token ids. max_tokens: to generate. sampling: further arguments of SamplingParams."""

    prompt: list[int]
    max_tokens: int
    sampling: Mapping = GREEDY


RATE, ACCEPTANCE = "output tokens/s", "mean acceptance length"
# The digits of each metric after the point in tables.
DIGITS = {"TTFT, s": 4, "TPOT, ms": 3, RATE: 0, ACCEPTANCE: 2}


@dataclass(frozen=True)
class Run:
    """One repetition of a case. total: seconds until all tokens are there.

    ttft: seconds until every request has one token, None where that is not measured. compiled: the Triton kernels that
    were compiled, or loaded from Triton's cache, during it. steps: those that gave a request tokens, summed over
    the requests.
    """

    ttft: float | None
    total: float
    compiled: list[str]
    steps: int

    def acceptance_length(self, requests: int, tokens: int) -> float:
        """The tokens that a request got from a step, after its first token. It is 1 without drafts."""
        return (tokens - requests) / (self.steps - requests)


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
        """The values of each run by metric, which DIGITS has."""


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
        return f"trace of {self.trace}, up to {self.prompt}/{self.output}"

    @property
    def requests(self) -> int:
        return self.trace

    def lengths_at_once(self) -> list[int]:
        return [prompt + output for prompt, output in self._sizes()][: self.trace // 2]

    def rounds(self, vocab_size: int) -> list[list[Request]]:
        """Two rounds: a lone request, after which the engine is awake, and all."""
        draw = random.Random(self.name)
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
        draw = random.Random(f"lengths of {self.name}")
        shortest, longest = math.log(self.SHORTEST), math.log(self.prompt)
        return [
            (round(math.exp(draw.uniform(shortest, longest))), draw.randint(self.SHORTEST_ANSWER, self.output))
            for _ in range(self.trace)
        ]


# A row is of the first kind whose name is one of its fields.
KINDS: tuple[type[Case], ...] = (Trace, Batch)


def from_row(row: Mapping) -> Case:
    """The case that a row of cases.yaml, or a record, describes."""
    return next(kind for kind in KINDS if kind.KIND in row)(**row)


def load(models: str) -> list[Case]:
    """The cases of cases.yaml for models of a sort: gpu or cpu."""
    return [*map(from_row, yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text())[models])]


def _prompt(draw: random.Random, length: int, vocab_size: int) -> list[int]:
    return draw.choices(range(SPECIAL_IDS, vocab_size), k=length)
