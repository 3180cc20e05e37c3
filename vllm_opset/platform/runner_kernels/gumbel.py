"""The kernels of `vllm.v1.worker.gpu.sample.gumbel`, which serve where vLLM's own sampler draws."""

from typing import TypeVar

import numpy as np
import torch

from vllm_opset.platform.runner_kernels._registry import implements

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xCC9E2D51, 0x1B873593)
FINAL_MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)
HASHED_BYTES = 16
LEAST_LOG = float(torch.log(torch.tensor(2**-24)))  # in fp32, as the kernel has it
SECOND_WORD = 0x9E3779B9  # the hash starts here for the upper word of a 64-bit number

Words = TypeVar("Words")  # int64 tensors, or uint32 arrays of NumPy


@implements("gpu.sample.gumbel._temperature_kernel", ignores="vocab_size")
def temperature(logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, temperature: torch.Tensor) -> None:
    """Divide the logits by their request's temperature, in place, if it is not 0, which means greedy."""
    divisors = temperature[expanded_idx_mapping].float()
    logits.div_(divisors.masked_fill_(divisors == 0, 1.0)[:, None])


@implements(
    "gpu.sample.gumbel._gumbel_sample_kernel",
    # These are for drafts that a model draws by their probability, which are refused on a CPU and on an NPU.
    ignores="logits_cache_col logits_cache_source IS_DRAFTING PER_TOKEN_COL",
)
def gumbel_sample(
    local_argmax: torch.Tensor,
    local_max: torch.Tensor,
    logits_cache: None,
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    seeds: torch.Tensor,
    pos: torch.Tensor,
    temp: torch.Tensor,
    vocab_size: int,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
) -> None:
    """The most probable token of each row, with Gumbel noise unless the temperature is 0.

    local_argmax, local_max: [rows, num_blocks], the token and its noisy logit in each block of the vocabulary. vLLM
    takes the best block. Here each block has the best token of all.
    """
    assert logits_cache is None
    dtype = torch.float64 if USE_FP64 else torch.float32
    degrees = temp[expanded_idx_mapping].float()[:, None]
    scores = logits.float()
    if APPLY_TEMPERATURE:
        scores = scores / degrees.masked_fill(degrees == 0, 1.0)
    noise = gumbel_noise(seeds[expanded_idx_mapping], pos, vocab_size, dtype)
    best, tokens = torch.where(degrees == 0, scores.to(dtype), scores + noise).max(1, keepdim=True)
    local_max.copy_(best.expand_as(local_max))
    local_argmax.copy_(tokens.expand_as(local_argmax))


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    """−log(−log(1 − u)) for fp32 and −log(−log(u)) for fp64, where u is the uniform number of each token."""
    words = murmur3(seeds, positions, vocab_size)
    if dtype == torch.float32:
        uniform = (words >> 16).float() * 2**-16 + ((words & 0xFFFF).float() + 0.5) * 2**-32
        return -torch.log(-torch.log1p(-uniform).clamp(min=LEAST_LOG))
    upper = murmur3(seeds, positions, vocab_size, SECOND_WORD)
    uniform = ((upper << 21 | words >> 11).double() + 0.5) * 2**-53
    return -torch.log(-torch.log(uniform.clamp(max=1 - 2**-53)))


def murmur3(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int, start: int = 0) -> torch.Tensor:
    """A 32-bit hash of seed, position and token: int64 [rows, vocab_size].

    Semantics: Appleby's MurmurHash3_x86_32 of the two words of the seed, the lower word of the position and the token.
    """
    state = torch.full_like(seeds, start)
    for word in (seeds, seeds >> 32, positions):
        state = _mixed(state, word & MASK)
    state, tokens = state[:, None], torch.arange(vocab_size, device=seeds.device)
    if seeds.device.type != "cpu":
        return _finished(state, tokens)
    # NumPy has unsigned integers of 32 bits, and takes a tenth of the time.
    hashes = _finished(*(words.numpy().astype(np.uint32) for words in (state, tokens)))
    return torch.from_numpy(hashes.astype(np.int64))


def _finished(state: Words, tokens: Words) -> Words:
    """The hashes of tokens [vocab_size] by the states [rows, 1] that the other words gave."""
    state = _mixed(state, tokens) ^ HASHED_BYTES
    state = (state ^ state >> 16) * FINAL_MULTIPLIERS[0] & MASK
    state = (state ^ state >> 13) * FINAL_MULTIPLIERS[1] & MASK
    return state ^ state >> 16


def _mixed(state: Words, word: Words) -> Words:
    word = _rotated(word * MULTIPLIERS[0] & MASK, 15) * MULTIPLIERS[1] & MASK
    return _rotated(state ^ word, 13) * 5 + 0xE6546B64 & MASK


def _rotated(word: Words, bits: int) -> Words:
    return (word << bits | word >> 32 - bits) & MASK
