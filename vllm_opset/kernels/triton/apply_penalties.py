"""apply_penalties: one program per row. It touches only the logits of the tokens that occur."""

import torch
import triton
import triton.language as tl

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _launch, _supports
from vllm_opset.kernels.triton._launch import pdl_wait


@kernel(ops.apply_penalties, name="triton", supports=_supports.floats)
def apply_penalties(
    logits: torch.Tensor,
    prompt_token_ids: torch.Tensor,
    output_token_ids: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    values = _launch.parameters("apply_penalties", logits.device, num_rows)
    counts = torch.empty((num_rows, vocab_size), dtype=torch.int32, device=logits.device)
    prompt, output = prompt_token_ids, output_token_ids
    _launch.launch(
        _apply_penalties, (num_rows,),
        logits, logits.stride(), counts, vocab_size, prompt, *_strides(prompt), prompt.shape[1],
        output, *_strides(output), output.shape[1], (repetition, presence, frequency),
        (repetition.stride(0), presence.stride(0), frequency.stride(0)),
        TILE=values["tile"], num_warps=values["warps"], **_launch.launch_options(logits.device),
    )  # fmt: skip


def _strides(ids: torch.Tensor) -> tuple[int, int]:
    """The strides of token lists. Empty lists may have any strides, each of which would compile another variant."""
    return ids.stride() if ids.numel() else (1, 1)


@triton.jit(do_not_specialize=["vocab_size", "prompt_stride", "num_prompt", "output_stride", "num_output"])
def _apply_penalties(
    logits, logits_strides, counts, vocab_size, prompt, prompt_stride, prompt_step, num_prompt,
    output, output_stride, output_step, num_output, penalties, strides,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Initialises, increments and reads only the counters of the tokens that occur."""
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    repetition = tl.load(penalties[0] + row * strides[0])
    presence = tl.load(penalties[1] + row * strides[1])
    frequency = tl.load(penalties[2] + row * strides[2])
    prompt += row * prompt_stride
    output += row * output_stride
    logits += row * logits_strides[0]
    counts += row * vocab_size
    for first in range(0, num_prompt, TILE):
        token, inside = _tokens(prompt, prompt_step, first, num_prompt, vocab_size, TILE)
        tl.store(counts + token, 0, inside)
    for first in range(0, num_output, TILE):
        token, inside = _tokens(output, output_step, first, num_output, vocab_size, TILE)
        tl.store(counts + token, 0, inside)
    tl.debug_barrier()
    for first in range(0, num_output, TILE):
        token, inside = _tokens(output, output_step, first, num_output, vocab_size, TILE)
        tl.atomic_add(counts + token, 1, inside, sem="relaxed", scope="cta")
    tl.debug_barrier()
    for first in range(0, num_prompt, TILE):
        token, inside = _tokens(prompt, prompt_step, first, num_prompt, vocab_size, TILE)
        _penalise(logits, logits_strides[1], counts, token, inside, repetition, presence, frequency)
    for first in range(0, num_output, TILE):
        token, inside = _tokens(output, output_step, first, num_output, vocab_size, TILE)
        _penalise(logits, logits_strides[1], counts, token, inside, repetition, presence, frequency)


@triton.jit
def _tokens(ids, stride, first, number, vocab_size, TILE: tl.constexpr):
    """Some tokens of a list, and a mask that is false for padding."""
    place = first + tl.arange(0, TILE)
    token = tl.load(ids + place.to(tl.int64) * stride, place < number, vocab_size)
    return token, (token >= 0) & (token < vocab_size)


@triton.jit
def _penalise(logits, stride, counts, token, inside, repetition, presence, frequency):
    """Changes the logits of tokens. A token may occur again, so only the first thread to take its count changes it.

    The minimum takes the count and leaves −1. An exchange would too, but Triton 3.7 cannot compile it for AMD GPUs.
    """
    count = tl.atomic_min(counts + token, -1, inside, sem="relaxed", scope="cta")
    mine = inside & (count >= 0)
    place = logits + token * stride
    value = tl.load(place, mine, 0.0).to(tl.float32)
    value = tl.where(value > 0, value / repetition, value * repetition)
    value -= frequency * count.to(tl.float32)
    value = tl.where(count > 0, value - presence, value)
    tl.store(place, value.to(logits.dtype.element_ty), mine)
