"""What the tests ask engines, and what these answer."""

import functools
from collections.abc import Sequence

import engines
import models

# Heads as the NPU's attention takes them, which the models of tests/engine do not have.
WIDE = {"head_dim": 64}
WIDE_OF = {"gpt_neox": {"hidden_size": 256}}
NUM_TOKENS = 24
# Within a block of 128 and beyond several, more than a step takes at a time.
LENGTHS = (1, 40, 127, 128, 129, 300)

generate = functools.partial(engines.generate, max_tokens=NUM_TOKENS)
served = engines.served


def prompts() -> list[list[int]]:
    return models.prompts(LENGTHS)


def build(name: str, folder, **changes):
    return models.build(name, folder, **{**WIDE_OF.get(name, WIDE), **changes})


def tokens(llm, prompts: Sequence[Sequence[int]], **sampling) -> list[list[int]]:
    return engines.tokens(generate(llm, prompts, **sampling))


def expected(model, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """transformers' greedy answers."""
    return [models.generate(model, list(prompt), NUM_TOKENS)[0] for prompt in prompts]
