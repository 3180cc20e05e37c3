"""Kernels that prepare the inputs of a model that drafts."""

import torch

from launches._launch import LENGTH, POISON, ROOM, VOCABULARY, Batch, Launch, floats, ints, of, starts

OF_A_MODEL = "gpu.spec_decode.standalone_ar.speculator"
OF_LAYERS = "gpu.spec_decode.target_dependent_ar.speculator"


class Verified(Batch):
    """A batch whose requests have drafts as well, some of which were rejected."""

    def __init__(self, random: torch.Generator) -> None:
        super().__init__(random)
        self.drafts = ints(random, 0, 4, self.size)
        self.rejected = (torch.rand(self.size, generator=random) * (self.drafts + 1)).int()
        lengths = self.lengths + self.drafts
        self.starts, self.num_tokens = starts(lengths), int(lengths.sum())
        self.values = {
            "target_input_ids": ints(random, 0, VOCABULARY, self.num_tokens + 1),
            "target_positions": ints(random, 0, LENGTH, self.num_tokens, dtype=torch.int64),
            "idx_mapping": self.requests,
            "last_token_indices": torch.full((ROOM,), POISON),
            "query_start_loc": self.starts,
            "seq_lens": (self.computed[self.requests] + lengths).int(),
            "num_rejected": self.rejected,
            "max_num_reqs": ROOM,
            "max_model_len": 60,
            "BLOCK_SIZE": 16,
        }


def _poisoned(*shape: int, dtype=torch.int32) -> torch.Tensor:
    return torch.full(shape, POISON, dtype=dtype)


@of(f"{OF_A_MODEL}._prepare_prefill_inputs_kernel")
def prepare_expanded_inputs(random):
    batch = Verified(random)
    values = batch.values | {
        "last_sampled": ints(random, 0, VOCABULARY, ROOM, 1),
        "out_input_ids": _poisoned(500),
        "out_positions": _poisoned(500, dtype=torch.int64),
        "out_query_start_loc": _poisoned(ROOM + 1),
        "out_seq_lens": _poisoned(ROOM),
    }
    return Launch((batch.size,), values)


@of(f"{OF_LAYERS}._prepare_prefill_inputs_kernel")
def prepare_shifted_inputs(random):
    batch = Verified(random)
    values = batch.values | {
        "last_sampled": ints(random, 0, VOCABULARY, ROOM, 1, dtype=torch.int64),
        "next_prefill_tokens": ints(random, 0, VOCABULARY, 1, ROOM),
        "num_sampled": ints(random, 0, 2, batch.size),
        "draft_current_step": torch.tensor(POISON),
        "draft_input_ids": _poisoned(500),
        "draft_positions": _poisoned(500, dtype=torch.int64),
        "draft_query_start_loc": _poisoned(ROOM + 1),
        "draft_seq_lens": _poisoned(ROOM),
    }
    return Launch((batch.size,), values)


def _inputs(random) -> dict:
    return {
        "input_ids": _poisoned(500),
        "positions": ints(random, 0, LENGTH, 500, dtype=torch.int64),
        "sample_src_positions": ints(random, 0, LENGTH, ROOM, dtype=torch.int64),
        "seq_lens": ints(random, 0, LENGTH, ROOM),
        "max_model_len": 60,
        "max_num_reqs": ROOM,
        "BLOCK_SIZE": 16,
        "ADVANCE_DRAFT_POSITIONS": bool(ints(random, 0, 2, 1)),
    }


@of(f"{OF_LAYERS}._prepare_decode_inputs_kernel")
def prepare_decode_inputs(random):
    batch = Verified(random)
    values = _inputs(random) | {
        "draft_tokens": ints(random, 0, VOCABULARY, batch.size, 3, dtype=torch.int64)[:, 0],
        "target_seq_lens": batch.values["seq_lens"],
        "num_rejected": batch.rejected,
        "query_start_loc": _poisoned(ROOM + 1),
    }
    return Launch((batch.size + 1,), values)


@of(f"{OF_LAYERS}._update_draft_inputs_kernel")
def update_draft_inputs(random):
    size = int(ints(random, 3, ROOM, 1))
    values = _inputs(random) | {
        "output_draft_tokens": torch.full((ROOM, 3), POISON),
        "next_input_hidden_states": floats(random, ROOM, 40),
        "draft_tokens": ints(random, 0, VOCABULARY, size, dtype=torch.int64),
        "current_draft_step": ints(random, 0, 3, 1, dtype=torch.int64).squeeze(0),
        "hidden_states": floats(random, size, 40),
        "hidden_size": 40,
        "num_speculative_steps": 3,
    }
    return Launch((size,), values)
