"""What the tests ask engines, and what these answer."""

from collections.abc import Sequence

import models

# Heads as the NPU's attention takes them, which the models of tests/engine do not have.
WIDE = {"head_dim": 64}
WIDE_OF = {"gpt_neox": {"hidden_size": 256}}
NUM_TOKENS = 24
# Within a block of 128 and beyond several, more than a step takes at a time.
LENGTHS = (1, 40, 127, 128, 129, 300)


def prompts() -> list[list[int]]:
    return models.prompts(LENGTHS)


def build(name: str, folder, **changes):
    return models.build(name, folder, **{**WIDE_OF.get(name, WIDE), **changes})


def generate(llm, prompts: Sequence[Sequence[int]], **sampling) -> list:
    from vllm import SamplingParams

    settings = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False} | sampling
    return llm.generate([{"prompt_token_ids": p} for p in prompts], SamplingParams(**settings), use_tqdm=False)


def tokens(llm, prompts: Sequence[Sequence[int]], **sampling) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in generate(llm, prompts, **sampling)]


def expected(model, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """transformers' greedy answers."""
    return [models.generate(model, list(prompt), NUM_TOKENS)[0] for prompt in prompts]


def served(llm) -> dict[str, set[str]]:
    """The kernels that ran, by op."""
    (report,) = llm.collective_rpc("opset_report")
    ran: dict[str, set[str]] = {}
    for row in report:
        if row["calls"]:
            ran.setdefault(row["op"], set()).add(row["kernel"])
    return ran
