"""The requests that the tests send to engines, and the engines' answers."""

import functools
from collections.abc import Sequence

import engines
import models

# Head sizes that the NPU's attention takes; the models of tests/engine have other sizes.
WIDE = {"head_dim": 64}
WIDE_OF = {"gpt_neox": {"hidden_size": 256}}
NUM_TOKENS = 24
# Lengths within a block of 128, beyond several blocks, and beyond the tokens of one step.
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
    """The greedy answers of transformers."""
    return [models.generate(model, list(prompt), NUM_TOKENS)[0] for prompt in prompts]
