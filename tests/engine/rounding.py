"""How far rounding alone takes log-probabilities from those of exact weights: the scale of the errors of engines.

transformers computes them in bf16, on the CPU. The inputs of quantised layers are rounded here by the definitions of
the formats, so no code is shared with the engines.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import models
import torch
from quantised import BLOCK, FP8, INPUT_SCALE, INT8
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedModel

# Two ways to round the same small mixture of experts differ by up to 1.35 in their mean errors. Two swapped experts of
# a layer give 2.6 times the error if the checkpoint holds the scales of activations, and over 9 times in other formats.
TOLERANCE = 1.6
LARGEST = {FP8: torch.finfo(FP8).max, INT8: 127}


def loaded(folder: Path) -> PreTrainedModel:
    """transformers' model of unquantised weights, in fp32. Its experts multiply by `linear`, one after the other."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()


def rounded(x: torch.Tensor, dtype: torch.dtype, columns: int = -1, scale: float | None = None) -> torch.Tensor:
    """x as `dtype` holds it, with this scale, or with one for each group of so many columns of a row (-1: all)."""
    groups = x.float().unflatten(-1, (-1, x.shape[-1] if columns == -1 else columns))
    scales = groups.abs().amax(-1, keepdim=True) / LARGEST[dtype] if scale is None else torch.tensor(scale)
    quotients = (groups / scales.clamp(min=2.0**-30)).clamp(-LARGEST[dtype], LARGEST[dtype])
    stored = quotients.to(dtype) if dtype.is_floating_point else quotients.round().to(dtype)
    return (stored.float() * scales).flatten(-2).to(x.dtype)


Round = Callable[[torch.Tensor], torch.Tensor]
# How the formats of `quantised_answers` round the inputs of layers. All others leave them as they are.
INPUTS: dict[str, Round] = {
    "channelwise": partial(rounded, dtype=FP8),
    "static": partial(rounded, dtype=FP8, scale=INPUT_SCALE),
    "blockwise": partial(rounded, dtype=FP8, columns=BLOCK),
    "int8": partial(rounded, dtype=INT8),
}


class RoundedInputs(TorchFunctionMode):
    """Rounds what is multiplied by these weights, or by parts of them."""

    def __init__(self, weights: Iterable[torch.Tensor], round_input: Round) -> None:
        super().__init__()
        self.memory, self.round_input = {_memory(weight) for weight in weights}, round_input

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is functional.linear and _memory(args[1]) in self.memory:
            args = self.round_input(args[0]), *args[1:]
        return func(*args, **(kwargs or {}))


def _memory(weight: torch.Tensor) -> int:
    return weight.untyped_storage().data_ptr()


def assert_alone(
    reference: PreTrainedModel,
    prompts: Sequence[list[int]],
    answers: Sequence[tuple[list[int], torch.Tensor]],
    round_input: Round | None = None,
) -> None:
    """An engine's log-probabilities of its own answers are as near the reference's as rounding alone leaves them.

    answers: see `engines.chosen`. round_input: of quantised layers, those whose names have `_proj`.
    """
    model = copy.deepcopy(reference).bfloat16()
    weights = [weight for name, weight in model.named_parameters() if round_input and "_proj" in name]
    with RoundedInputs(weights, round_input):
        alone = [
            (tokens, models.logprobs(model, prompt, tokens))
            for prompt, (tokens, _) in zip(prompts, answers, strict=True)
        ]
    found, expected = (models.mean_error(reference, prompts, logprobs) for logprobs in (answers, alone))
    assert found < TOLERANCE * expected, f"a mean error of {found:.3g}, where rounding alone gives {expected:.3g}"
