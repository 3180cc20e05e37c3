"""Random LoRA adapters, and transformers' models with the same adapters merged into their weights."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path

import engines
import models
import rounding
import torch
from safetensors.torch import save_file
from test_parity_with_transformers import MARGIN
from transformers import PreTrainedModel

RANK, ALPHA = 8, 16
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
HEAD, EMBEDDING = "lm_head", "embed_tokens"
RANKS = (8, 16, 8)
NUM_TOKENS = 16
CLOSE = 1e-4  # log-probabilities in fp32
# The mean error of log-probabilities is 5 if an adapter is left out or added. Rounding to fp8 gives 0.3.
ANOTHER_MODEL = 2


def save(
    model: PreTrainedModel, folder: Path, *, seed: int = 3, rank: int = RANK, adapted: Sequence[str] = ADAPTED
) -> None:
    """Makes the folder, saves a random adapter of all of these matrices to it, and merges it into the model."""
    torch.manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if name.endswith(tuple(adapted)):
            is_table = name.endswith(EMBEDDING)  # which multiplies a row that is 1 in one place
            weight = module.weight.data.T if is_table else module.weight.data
            down, up = torch.randn(rank, weight.shape[1]) * 0.1, torch.randn(weight.shape[0], rank) * 0.1
            form = "lora_embedding_{}" if is_table else "lora_{}.weight"
            tensors |= {f"base_model.model.{name}.{form.format(side)}": of for side, of in (("A", down), ("B", up))}
            weight += ALPHA / rank * up @ down
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "target_modules": [*adapted], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def request(folder: Path, number: int = 1):
    """A LoRARequest for the adapter in this folder. number: differs between the adapters of an engine."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(folder.name, number, str(folder))


class Adapted:
    """A model in fp32 with adapters. Choice 0 stands for no adapter, and choices 1, 2 and 3 for one of them.

    references: transformers' models. requests: see `request`. Both are by choice.
    """

    def __init__(self, folder: Path, adapted: Sequence[str] = (*ADAPTED, HEAD, EMBEDDING)) -> None:
        self.model, self.requests = folder / "model", [None]
        self.model.mkdir()
        self.references = [models.build("qwen3", self.model, tie_word_embeddings=False)]
        for number, rank in enumerate(RANKS, start=1):
            self.references.append(copy.deepcopy(self.references[0]))
            save(self.references[-1], folder / f"adapter {number}", seed=number, rank=rank, adapted=adapted)
            self.requests.append(request(folder / f"adapter {number}", number))
        self.prompts = models.prompts()

    def expected(self, choices: Sequence[int]) -> list[list[int]]:
        """The greedy answers to the prompts, each with the adapter of its choice."""
        chosen = zip(choices, self.prompts, strict=True)
        found = [models.generate(self.references[choice], prompt, NUM_TOKENS) for choice, prompt in chosen]
        assert min(margin for _, margin in found) > MARGIN, "an adapter has a near-tie: choose another seed"
        return [answer for answer, _ in found]

    def check(self, llm, choices: Sequence[int], **sampling) -> None:
        """The answers to all prompts at once, and the log-probabilities of the prompts if they are asked for."""
        requests = [self.requests[choice] for choice in choices]
        outputs = engines.generate(llm, self.prompts, requests, max_tokens=NUM_TOKENS, **sampling)
        assert engines.tokens(outputs) == self.expected(choices)
        for output, choice in zip(outputs, choices, strict=True):
            if output.prompt_logprobs is not None:
                first, *others = output.prompt_token_ids
                steps = zip(others, output.prompt_logprobs[1:], strict=True)
                found = torch.tensor([step[token].logprob for token, step in steps])
                expected = models.logprobs(self.references[choice], [first], others)
                torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE)


class BesideMerged:
    """Requests that take turns with and without an adapter, and transformers' models for both."""

    def __init__(self, plain: Path) -> None:
        """plain: the folder of the unquantised model. The adapter is saved beside it."""
        self.base, self.merged = (rounding.loaded(plain) for _ in range(2))
        folder = plain.with_name("adapter")
        save(self.merged, folder)
        self.prompts = models.prompts()
        self.adapted = [index % 2 == 1 for index in range(len(self.prompts))]
        self.requests = [request(folder) if yes else None for yes in self.adapted]

    def generate(self, llm, num_tokens: int) -> list:
        return engines.generate(llm, self.prompts, self.requests, max_tokens=num_tokens, logprobs=0)

    def check(self, outputs: list, round_input: rounding.Round | None = None) -> None:
        """Rounding alone explains the errors of the answers. round_input: see `rounding.assert_alone`."""
        answers = list(zip(self.prompts, engines.chosen(outputs), self.adapted, strict=True))
        for model, other, with_adapter in ((self.base, self.merged, False), (self.merged, self.base, True)):
            chosen = [(prompt, answer) for prompt, answer, yes in answers if yes is with_adapter]
            rounding.assert_alone(model, *zip(*chosen, strict=True), round_input)
            assert models.mean_error(other, *zip(*chosen, strict=True)) > ANOTHER_MODEL
