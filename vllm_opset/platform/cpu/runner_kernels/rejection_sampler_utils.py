"""The kernels of `vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils`, by the standard method.

A draft is certain of its token, so the target accepts it with the token's probability. The token that replaces the
first rejected draft is drawn among all others. The first rows of `rejection_sampler.py` say which logits are whose.
"""

import torch

from vllm_opset.ops.sampling import philox
from vllm_opset.platform.cpu.runner_kernels._memory import differences, ragged
from vllm_opset.platform.cpu.runner_kernels._registry import implements_for_drafts as implements
from vllm_opset.platform.cpu.runner_kernels.rejection_sampler import PLACEHOLDER
from vllm_opset.platform.runner_kernels.gumbel import gumbel_noise

MODULE = "gpu.spec_decode.rejection_sampler_utils"
# Where a model draws its drafts, the kernels also compare with the probabilities of these. Such models are refused.
OF_DRAWN_DRAFTS = "draft_logits draft_local_max draft_local_sumexp HAS_DRAFT_LOGITS"
OF_OTHER_METHODS = (
    "synthetic_conditional_rates cumulative_log_p local_residual_mass fly_entropy fly_entropy_threshold SYNTHETIC_MODE "
    "USE_BLOCK_VERIFICATION FLY_WINDOW_SIZE"
)
OF_WATERMARKS = (
    "contexts watermarking watermarking_skip_mask watermark_key_0 watermark_key_1 CONTEXT_WIDTH WATERMARK "
    "DEDUPLICATE_CONTEXTS"
)
# Triton's scale from 31 random bits to a uniform number below 1. It is the least number as well.
UNIFORM_STEP = 4.6566127342e-10


@implements(
    f"{MODULE}._compute_local_logits_stats_kernel",
    ignores=f"vocab_size num_logits num_speculative_steps {OF_DRAWN_DRAFTS}",
)
def compute_local_logits_stats(
    target_local_argmax: torch.Tensor,
    target_local_max: torch.Tensor,
    target_local_sumexp: torch.Tensor,
    target_logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    temp: torch.Tensor,
) -> None:
    """The best token of each row, its logit, and the sum of all exponentials before drafts if tokens are drawn.

    The three results: [num_logits, num_blocks], for each block of the vocabulary. Here each block has the best token of
    all, and the first one the whole sum.
    """
    logits = target_logits.float()
    tokens, best = best_tokens(logits)
    target_local_argmax.copy_(tokens.expand_as(target_local_argmax))
    target_local_max.copy_(best.expand_as(target_local_max))
    is_last = torch.nn.functional.pad(expanded_local_pos[1:], (0, 1)) == 0
    rows = (~is_last & (temp[expanded_idx_mapping] != 0)).nonzero().squeeze(1)
    if len(rows):
        target_local_sumexp[rows] = 0.0
        target_local_sumexp[rows, 0] = (logits[rows].logsumexp(1) - best[rows, 0]).exp()


def best_tokens(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The best token of each row and its score, [rows, 1]. PyTorch's own function takes 20 times as long as NumPy's."""
    tokens = torch.from_numpy(scores.numpy().argmax(1)).unsqueeze(1)
    return tokens, scores.gather(1, tokens)


@implements(
    f"{MODULE}._rejection_kernel",
    ignores=f"target_rejected_logsumexp draft_rejected_logsumexp vocab_num_blocks PADDED_VOCAB_NUM_BLOCKS "
    f"{OF_DRAWN_DRAFTS} {OF_OTHER_METHODS}",
)
def rejection(
    sampled: torch.Tensor,
    rejected_steps: torch.Tensor,
    target_logits: torch.Tensor,
    target_local_argmax: torch.Tensor,
    target_local_max: torch.Tensor,
    target_local_sumexp: torch.Tensor,
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    temp: torch.Tensor,
    seed: torch.Tensor,
    pos: torch.Tensor,
) -> None:
    """How many drafts of each request are accepted, and these. A greedy request's next token comes behind them.

    sampled: int64 [num_reqs, num_drafts + 1]. What stands behind these tokens is not meant to be read.
    """
    counts = differences(cu_num_logits) - 1
    reqs, places = map(torch.from_numpy, ragged(counts))
    rows = cu_num_logits[reqs] + places
    drafts, requests = draft_sampled[rows + 1].long(), idx_mapping[reqs]
    maxima, block = target_local_max[rows].max(1, keepdim=True)
    best = target_local_argmax[rows].gather(1, block).squeeze(1)
    is_greedy = temp[requests] == 0
    accepts = best == drafts
    if not is_greedy.all():
        sums = (target_local_sumexp[rows] * (target_local_max[rows] - maxima).exp()).sum(1)
        scores = target_logits[rows, drafts.clamp(min=0)].float() - maxima.squeeze(1) - sums.log()
        drawn = scores > uniform(seed[requests], pos[rows]).log()
        accepts = torch.where(is_greedy, accepts, drawn & (drafts >= 0))
    accepted = torch.zeros(sampled.shape, dtype=torch.int32)
    accepted[reqs, places] = accepts.int()
    rejected_steps.copy_(accepted.cumprod(1).sum(1))
    sampled[reqs, places] = torch.where(is_greedy, best, drafts)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Triton's `tl.rand` of each seed at a position, both int64: fp32, from UNIFORM_STEP to below 1.

    Where Triton gives 0, whose logarithm is infinite, this is UNIFORM_STEP.
    """
    words = (positions & philox.MASK, positions >> 32 & philox.MASK, 0, 0)
    first, *_ = philox.block(*words, seeds & philox.MASK, seeds >> 32 & philox.MASK)
    return (torch.minimum(first, philox.MASK - first).float() * UNIFORM_STEP).clamp(min=UNIFORM_STEP)


@implements(
    f"{MODULE}._resample_kernel",
    ignores=f"target_rejected_logsumexp draft_rejected_logsumexp vocab_size USE_FP64 "
    f"{OF_DRAWN_DRAFTS} {OF_OTHER_METHODS} {OF_WATERMARKS}",
)
def resample(
    resampled_local_argmax: torch.Tensor,
    resampled_local_max: torch.Tensor,
    target_logits: torch.Tensor,
    rejected_step: torch.Tensor,
    cu_num_logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    draft_sampled: torch.Tensor,
    temp: torch.Tensor,
    seed: torch.Tensor,
    pos: torch.Tensor,
) -> None:
    """Draw the token behind the accepted drafts, but for greedy requests that rejected one: theirs is known.

    The results: [num_reqs, num_blocks], the token and its noisy logit in each block of the vocabulary. Here each block
    has the best token of all.
    """
    rows = cu_num_logits[:-1] + rejected_step
    is_last = rows == cu_num_logits[1:] - 1
    reqs = (is_last | (temp[expanded_idx_mapping[rows]] != 0)).nonzero().squeeze(1)
    rows, is_last = rows[reqs], is_last[reqs]
    requests = expanded_idx_mapping[rows]
    scores = target_logits[rows].to(resampled_local_max.dtype)
    rejected = draft_sampled[(rows + 1).clamp(max=len(draft_sampled) - 1)].masked_fill(is_last, PLACEHOLDER)
    masked = (rejected >= 0).nonzero().squeeze(1)
    scores[masked, rejected[masked].long()] = -torch.inf
    drawn = (temp[requests] != 0).nonzero().squeeze(1)
    if len(drawn):
        seeds, positions = seed[requests[drawn]], pos[rows[drawn]]
        scores[drawn] += gumbel_noise(seeds, positions, scores.shape[1], scores.dtype)
    resampled_local_argmax[reqs], resampled_local_max[reqs] = best_tokens(scores)


@implements(f"{MODULE}._insert_resampled_kernel", ignores="resample_num_blocks PADDED_RESAMPLE_NUM_BLOCKS")
def insert_resampled(
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    resampled_local_argmax: torch.Tensor,
    resampled_local_max: torch.Tensor,
    cu_num_logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    temp: torch.Tensor,
) -> None:
    """Put the token of `resample` behind the accepted drafts. Greedy requests that rejected one have it. Count it."""
    rows = cu_num_logits[:-1] + num_sampled
    is_drawn = (rows == cu_num_logits[1:] - 1) | (temp[expanded_idx_mapping[rows]] != 0)
    reqs = is_drawn.nonzero().squeeze(1)
    block = resampled_local_max[reqs].nan_to_num(nan=-torch.inf).argmax(1, keepdim=True)
    sampled[reqs, num_sampled[reqs].long()] = resampled_local_argmax[reqs].gather(1, block).squeeze(1)
    num_sampled += 1
