"""The cases of a comparison of engines: which requests are asked together, and what is measured."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

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


@dataclass(frozen=True)
class Case:
    """batch: requests at a time. prompt, output: tokens of each. sampling: of SamplingParams; greedy if it is empty."""

    batch: int
    prompt: int
    output: int
    sampling: Mapping = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.batch}x{self.prompt}/{self.output}{' sampled' if self.sampling else ''}"

    @property
    def length(self) -> int:
        """The tokens of the longest request."""
        return self.prompt + self.output

    @property
    def is_greedy(self) -> bool:
        return not self.sampling

    def lengths_at_once(self) -> list[int]:
        """The lengths of requests for which the KV cache has room at the same time."""
        return [self.length] * self.batch

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random token ids, which are the same in every run and differ between requests."""
        draw = random.Random(self.name)
        return [_prompt(draw, self.prompt, vocab_size) for _ in range(self.batch)]

    def rounds(self, vocab_size: int) -> list[list[Request]]:
        """The requests of one repetition, by rounds. The last rounds are one token for all prompts, and all tokens."""
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
class Trace:
    """Requests of mixed lengths, all asked at once, of which the KV cache has room for half.

    The prompts have SHORTEST to `prompt` tokens, short ones more often. The answers have SHORTEST_ANSWER to `output`
    tokens. A third of the requests is greedy, a third is sampled, and a third is sampled with a seed of its own.
    """

    trace: int
    prompt: int
    output: int

    SHORTEST = 16
    SHORTEST_ANSWER = 8
    is_greedy = False

    @property
    def name(self) -> str:
        return f"trace of {self.trace}, up to {self.prompt}/{self.output}"

    @property
    def length(self) -> int:
        """The tokens of the longest request."""
        return self.prompt + self.output

    def lengths_at_once(self) -> list[int]:
        """The lengths of requests for which the KV cache has room at the same time."""
        return [prompt + output for prompt, output in self._sizes()][: self.trace // 2]

    def rounds(self, vocab_size: int) -> list[list[Request]]:
        """The requests of one repetition, by rounds: a lone one, after which the engine is awake, and all."""
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


def load(kind: str) -> list[Case | Trace]:
    """The cases of cases.yaml for models of a kind."""
    rows = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text())[kind]
    return [Trace(**row) if "trace" in row else Case(**row) for row in rows]


def _prompt(draw: random.Random, length: int, vocab_size: int) -> list[int]:
    return draw.choices(range(SPECIAL_IDS, vocab_size), k=length)
