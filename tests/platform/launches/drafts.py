"""Kernels that draft tokens by n-grams, and that verify drafts."""

import math

import torch

from launches._launch import LENGTH, POISON, ROOM, VOCABULARY, Batch, Launch, Rows, floats, ints, of, some

NGRAM = "gpu.spec_decode.ngram.speculator"
SAMPLER = "gpu.spec_decode.rejection_sampler"
UTILS = f"{SAMPLER}_utils"
BLOCKS = math.ceil(VOCABULARY / 64)


def _searched(random) -> tuple[Batch, dict]:
    batch, blocks = Batch(random), LENGTH // 16
    batch.known %= 3  # so that there are matches
    return batch, {
        "token_ids": batch.known,
        "idx_mapping": batch.requests,
        "total_len": some(random, ints(random, 0, LENGTH + 1, ROOM), 3),
        "num_sampled": ints(random, 0, 3, batch.size),
        "scratch": torch.full((ROOM, blocks), POISON),
        "L": LENGTH,
    }


@of(f"{NGRAM}._ngram_scan_kernel")
def ngram_scan(random):
    batch, values = _searched(random)
    least = int(ints(random, 1, 4, 1))
    values |= {"MIN_N": least, "MAX_N": least + int(ints(random, 0, 4, 1)), "MAX_N_PO2": 8, "BLOCK_L": 16}
    grid = (batch.size, values["scratch"].shape[1])
    return Launch(grid, values, lambda after: {"best": after["scratch"][: batch.size].amax(1)})


@of(f"{NGRAM}._ngram_finalize_kernel")
def ngram_finalize(random):
    batch, values = _searched(random)
    sizes = ints(random, 1, 4, batch.size, 1, dtype=torch.int64)
    places = (torch.rand(batch.size, 1, generator=random) * values["total_len"][batch.requests, None]).long()
    values["scratch"][: batch.size] = some(random, sizes * (LENGTH + 1) + places + 1, 0)
    values |= {
        "last_sampled": ints(random, 0, VOCABULARY, ROOM, dtype=torch.int64),
        "drafts": torch.full((ROOM, 5), POISON),
        "N_BLOCKS": values["scratch"].shape[1],
        "K": 5,
        "K_PO2": 8,
        "N_BLOCKS_PO2": 8,
    }
    return Launch((batch.size,), values)


@of(f"{SAMPLER}._flatten_sampled_kernel")
def flatten_sampled(random):
    rows = Rows(random)
    values = {
        "flat_sampled": torch.full((rows.number,), POISON),
        "sampled": ints(random, 0, VOCABULARY, rows.batch.size, 4, dtype=torch.int64),
        "num_sampled": (torch.rand(rows.batch.size, generator=random) * (rows.counts + 1)).int(),
        "cu_num_logits": rows.starts,
    }
    return Launch((rows.batch.size,), values)


@of(f"{SAMPLER}._gather_draft_sampled_kernel")
def gather_draft_sampled(random):
    rows = Rows(random)
    indices, positions = torch.randperm(60, generator=random)[: rows.number], torch.zeros(60, dtype=torch.int64)
    # Some requests begin the step before the end of their prefill.
    begins = rows.batch.prefill + ints(random, -1, 2, ROOM)
    positions[indices] = (begins[rows.requests] + rows.places).long()
    values = {
        "draft_sampled": torch.full((rows.number,), POISON, dtype=torch.int32),
        "pos": torch.full((rows.number,), POISON),
        "input_ids": ints(random, 0, VOCABULARY, 60),
        "positions": positions,
        "logits_indices": indices,
        "expanded_idx_mapping": rows.requests,
        "expanded_local_pos": rows.places,
        "prefill_len": rows.batch.prefill,
        "num_logits": rows.number,
        "BLOCK_SIZE": 8,
    }
    return Launch((math.ceil(rows.number / 8),), values)


class Drafted(Rows):
    """Rows whose drafts are the best tokens or any other, or none. Some requests are greedy."""

    def __init__(self, random: torch.Generator) -> None:
        super().__init__(random)
        self.temperature = ints(random, 0, 3, ROOM) / 2
        best = torch.cat([torch.zeros(1, dtype=torch.int64), self.logits[:-1].argmax(1)])
        kind = ints(random, 0, 4, self.number)
        other = torch.where(kind == 2, ints(random, 0, VOCABULARY, self.number), -1)
        self.drafts = torch.where(kind < 2, best, other).int()
        self.logits[:-1][self.drafts[1:] < 0, 0] = 30  # no placeholder may be taken for token 0
        self.is_last = torch.nn.functional.pad(self.places[1:], (0, 1)) == 0
        self.values = {
            "expanded_idx_mapping": self.requests,
            "expanded_local_pos": self.places,
            "idx_mapping": self.batch.requests,
            "cu_num_logits": self.starts,
            "draft_sampled": self.drafts,
            "target_logits": self.logits,
            "temp": self.temperature,
            "seed": ints(random, -(2**62), 2**62, ROOM, dtype=torch.int64),
            "pos": ints(random, 0, LENGTH, self.number, dtype=torch.int64),
            "vocab_size": VOCABULARY,
            "num_logits": self.number,
            "num_speculative_steps": 3,
            "vocab_num_blocks": BLOCKS,
            "PADDED_VOCAB_NUM_BLOCKS": 4,
            **dict.fromkeys(UNUSED),
            **dict.fromkeys(OFF, False),
            "fly_entropy_threshold": 0.0,
            "FLY_WINDOW_SIZE": 0,
            "watermark_key_0": 0,
            "watermark_key_1": 0,
            "CONTEXT_WIDTH": 1,
        }

    def blocks(self) -> torch.Tensor:
        """The logits by blocks of the vocabulary: [rows, blocks, 64]."""
        pad = (0, BLOCKS * 64 - VOCABULARY)
        return torch.nn.functional.pad(self.logits, pad, value=-math.inf).unflatten(1, (BLOCKS, 64))


# For drafts that a model draws by their probability, other ways to verify drafts, and watermarks.
UNUSED = (
    "draft_logits", "draft_local_max", "draft_local_sumexp", "synthetic_conditional_rates", "cumulative_log_p",
    "local_residual_mass", "fly_entropy", "contexts", "watermarking", "watermarking_skip_mask",
)  # fmt: skip
OFF = ("HAS_DRAFT_LOGITS", "SYNTHETIC_MODE", "USE_BLOCK_VERIFICATION", "USE_FP64", "WATERMARK", "DEDUPLICATE_CONTEXTS")


def _empty(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned buffers for a token and a number of each block of the vocabulary, [rows, BLOCKS]."""
    return torch.full((rows, BLOCKS), POISON), torch.full((rows, BLOCKS), float(POISON))


@of(f"{UTILS}._compute_local_logits_stats_kernel")
def compute_local_logits_stats(random):
    rows = Drafted(random)
    argmax, maxima = _empty(rows.number)
    values = rows.values | {
        "target_local_argmax": argmax,
        "target_local_max": maxima,
        "target_local_sumexp": maxima.clone(),
        "BLOCK_SIZE": 64,
    }

    def compared(after):
        """The results over all blocks, as the next kernels compute them, in the rows that these read."""
        best, block = after["target_local_max"].max(1, keepdim=True)
        sums = after["target_local_sumexp"] * (after["target_local_max"] - best).exp()
        is_greedy = rows.temperature[rows.requests] == 0
        tokens = after["target_local_argmax"].gather(1, block).squeeze(1)
        return {
            "best": best.squeeze(1).where(~rows.is_last, 0),
            "token": tokens.where(~rows.is_last & is_greedy, 0),
            "sum": sums.sum(1).where(~rows.is_last & ~is_greedy, 0),
        }

    return Launch((rows.number, BLOCKS), values, compared)


@of(f"{UTILS}._rejection_kernel")
def rejection(random):
    rows = Drafted(random)
    size = rows.batch.size
    maxima, places = rows.blocks().max(2)
    values = rows.values | {
        "sampled": torch.full((size, 4), POISON),
        "rejected_steps": torch.full((size,), POISON, dtype=torch.int32),
        "target_rejected_logsumexp": torch.zeros(size),
        "draft_rejected_logsumexp": torch.zeros(size),
        "target_local_argmax": places + torch.arange(BLOCKS) * 64,
        "target_local_max": maxima,
        "target_local_sumexp": (rows.blocks() - maxima[:, :, None]).exp().sum(2),
    }

    def compared(after):
        """The tokens that are accepted, and those that replace rejected drafts of greedy requests."""
        accepted = after["rejected_steps"]
        replaces = (rows.temperature[rows.batch.requests] == 0) & (accepted < rows.counts - 1)
        is_token = torch.arange(4) < (accepted + replaces)[:, None]
        return {"accepted": accepted, "tokens": after["sampled"].where(is_token, 0)}

    return Launch((size,), values, compared)


def _verified(random) -> tuple[Drafted, torch.Tensor, torch.Tensor]:
    """How many drafts of each request are accepted, and which requests need a draw."""
    rows = Drafted(random)
    accepted = (torch.rand(rows.batch.size, generator=random) * rows.counts).int()
    needs_draw = (rows.temperature[rows.batch.requests] != 0) | (accepted == rows.counts - 1)
    return rows, accepted, needs_draw


@of(f"{UTILS}._resample_kernel")
def resample(random):
    rows, accepted, needs_draw = _verified(random)
    argmax, maxima = _empty(rows.batch.size)
    in_fp64 = bool(ints(random, 0, 2, 1))
    values = rows.values | {
        "resampled_local_argmax": argmax,
        "resampled_local_max": maxima.double() if in_fp64 else maxima,
        "target_rejected_logsumexp": torch.zeros(rows.batch.size),
        "draft_rejected_logsumexp": torch.zeros(rows.batch.size),
        "rejected_step": accepted,
        "BLOCK_SIZE": 64,
        "USE_FP64": in_fp64,
    }

    def drawn(after):
        best, block = after["resampled_local_max"].max(1, keepdim=True)
        tokens = after["resampled_local_argmax"].gather(1, block)
        return {"tokens": tokens.squeeze(1).where(needs_draw, 0), "scores": best.squeeze(1).where(needs_draw, 0)}

    return Launch((rows.batch.size, BLOCKS), values, drawn)


@of(f"{UTILS}._insert_resampled_kernel")
def insert_resampled(random):
    rows, accepted, _ = _verified(random)
    size = rows.batch.size
    values = rows.values | {
        "sampled": ints(random, 0, VOCABULARY, size, 4, dtype=torch.int64),
        "num_sampled": accepted,
        "resampled_local_argmax": ints(random, 0, VOCABULARY, size, BLOCKS, dtype=torch.int64),
        "resampled_local_max": some(random, floats(random, size, BLOCKS), math.nan),
        "resample_num_blocks": BLOCKS,
        "PADDED_RESAMPLE_NUM_BLOCKS": 4,
    }
    return Launch((size,), values)
