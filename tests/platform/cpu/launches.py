"""Random launches of the kernels that vLLM's second model runner launches. Run as a program, it gives vLLM's results.

The program runs vLLM's own kernels in Triton's interpreter and saves what they wrote. Its argument names the file.
"""

import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from vllm_opset.platform.bridges import find
from vllm_opset.platform.cpu.runner_kernels import parameters

ROOM, LENGTH, VOCABULARY = 9, 96, 150  # requests that have room, their longest length, and the width of the logits
POISON = -77
TRIALS = 3
WORKER = "vllm.v1.worker."


@dataclass(frozen=True)
class Launch:
    """values: by the kernel's parameters, without `_ptr`. Strides follow from the tensors.

    compared: what to compare afterwards, from the values; without it, all tensors.
    """

    grid: tuple[int, ...]
    values: dict
    compared: Callable[[Mapping], dict] = field(default=lambda values: values)

    def run(self, kernel, parameters: tuple[str, ...]) -> dict[str, torch.Tensor]:
        kernel[self.grid](*(self._argument(name.removesuffix("_ptr")) for name in parameters))
        after = self.compared(self.values)
        return {name: value for name, value in after.items() if isinstance(value, torch.Tensor)}

    def _argument(self, name: str):
        if name in self.values:
            return self.values[name]
        name = name.replace("_row_stride", "_stride_0").replace("_col_stride", "_stride_1")
        tensor, _, axis = name.partition("_stride")
        value = self.values[tensor]
        return 0 if value is None else value.stride(int(axis.lstrip("_") or 0))


LAUNCHES: dict[str, Callable[[torch.Generator], Launch]] = {}


def of(kernel: str):
    def register(function):
        LAUNCHES[WORKER + kernel] = function
        return function

    return register


def ints(random: torch.Generator, low: int, high: int, *shape: int, dtype=torch.int32) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=random).to(dtype)


def floats(random: torch.Generator, *shape: int) -> torch.Tensor:
    """Of both signs."""
    return torch.randn(shape, generator=random) * 4


def starts(lengths: torch.Tensor, padding: int = 0) -> torch.Tensor:
    """Where rows of these lengths begin, and the end, repeated `padding` times."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()[[*range(len(lengths) + 1), *[-1] * padding]]


def addresses(tensors) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


class Batch:
    """Some requests of ROOM, in random order: prefills, whole or in part, and decodes."""

    def __init__(self, random: torch.Generator) -> None:
        self.size = int(ints(random, 3, ROOM, 1))
        self.requests = torch.randperm(ROOM, generator=random)[: self.size]
        self.known = ints(random, 0, VOCABULARY, ROOM, LENGTH)
        self.prefill = ints(random, 5, LENGTH - 30, ROOM)
        self.prompt = self.prefill - ints(random, 0, 4, ROOM)
        self.computed = torch.where(ints(random, 0, 2, ROOM) > 0, self.prefill + ints(random, 0, 9, ROOM), 2)
        self.lengths = torch.where(
            self.computed[self.requests] < self.prefill[self.requests],
            torch.minimum(ints(random, 1, 40, self.size), (self.prefill - self.computed)[self.requests]),
            1,
        )
        self.starts = starts(self.lengths, padding=1)
        self.total = self.computed + 1
        self.num_tokens = int(self.lengths.sum())


class Rows:
    """Rows of logits: a few for each request of a batch, its first one and one for each draft."""

    def __init__(self, random: torch.Generator) -> None:
        self.batch = Batch(random)
        self.counts = ints(random, 1, 4, self.batch.size)
        self.starts = starts(self.counts)
        self.number = int(self.counts.sum())
        self.requests = self.batch.requests.repeat_interleave(self.counts)
        self.places = torch.cat([torch.arange(int(count)) for count in self.counts]).int()
        self.inputs = ints(random, 0, 5, self.number)
        self.logits = floats(random, self.number, VOCABULARY)


def some(random: torch.Generator, values: torch.Tensor, neutral: float) -> torch.Tensor:
    """The values, a part of them replaced by a neutral one."""
    return torch.where(ints(random, 0, 2, *values.shape) > 0, values, neutral)


@of("gpu.buffer_utils._apply_write_kernel")
def apply_write(random):
    lengths = ints(random, 1, 40, 5)
    several = bool(ints(random, 0, 2, 1))
    groups = ints(random, 0, 2, 5)
    tables = [torch.full((ROOM, LENGTH), POISON, dtype=torch.int32) for _ in range(2)]
    values = {
        "output": addresses(tables) if several else tables[0],
        "output_stride": torch.tensor([LENGTH, LENGTH]) if several else LENGTH,
        "write_indices": torch.randperm(ROOM, generator=random)[:5].int(),
        "write_starts": ints(random, 0, 50, 5),
        "write_contents": ints(random, 0, 1000, int(lengths.sum())),
        "write_cu_lens": lengths.cumsum(0).int(),
        "write_group_ids": groups if several else None,
        "BLOCK_SIZE": 16,
        "MULTI_GROUP": several,
    }
    return Launch((5, 3), values, lambda _: {"first": tables[0], "second": tables[1]})


@of("gpu.block_table._gather_block_tables_kernel")
def gather_block_tables(random):
    batch, tables = Batch(random), [ints(random, 1, 1000, ROOM, 12), ints(random, 1, 1000, ROOM, 20)]
    gathered = [torch.full_like(table, POISON) for table in tables]
    blocks = torch.stack([ints(random, 0, 12, ROOM), ints(random, 0, 20, ROOM)])
    values = {
        "batch_idx_to_req_idx": batch.requests,
        "src_block_table_ptrs": addresses(tables),
        "dst_block_table_ptrs": addresses(gathered),
        "block_table_strides": torch.tensor([12, 20]),
        "num_blocks": blocks,
        "num_reqs": batch.size,
        "num_computed_tokens": batch.computed,
        "sliding_window_reach": torch.tensor([0, 9], dtype=torch.int32),
        "block_sizes": torch.tensor([8, 4], dtype=torch.int32),
        "kept alive": tables,
        "MASK_SLIDING_WINDOW": bool(ints(random, 0, 2, 1)),
        "BLOCK_SIZE": 16,
    }
    # Behind a request's last block, the two differ: no one reads there.
    valid = [torch.arange(table.shape[1]) < of[batch.requests, None] for table, of in zip(tables, blocks, strict=True)]

    def compared(_):
        rows = [table[: batch.size] for table in gathered]
        return {str(i): row.where(is_valid, 0) for i, (row, is_valid) in enumerate(zip(rows, valid, strict=True))}

    return Launch((2, batch.size), values, compared)


@of("gpu.block_table._compute_slot_mappings_kernel")
def compute_slot_mappings(random):
    batch, tables = Batch(random), [ints(random, 1, 1000, ROOM, 12), ints(random, 1, 1000, ROOM, 24)]
    values = {
        "max_num_tokens": 400,
        "idx_mapping": some(random, batch.requests, -1),
        "query_start_loc": batch.starts,
        "pos": ints(random, 0, LENGTH, batch.num_tokens, dtype=torch.int64),
        "block_table_ptrs": addresses(tables),
        "block_table_strides": torch.tensor([12, 24]),
        "block_sizes": torch.tensor([8, 4], dtype=torch.int32),
        "kernel_block_sizes": torch.tensor([8, 4], dtype=torch.int32),
        "slot_mapping_enabled": torch.tensor([True, bool(ints(random, 0, 2, 1))]),
        "dcp_sharded": torch.tensor([True, True]),
        "slot_mappings": torch.full((2, 400), POISON),
        "cp_rank": 0,
        "CP_SIZE": 1,
        "CP_INTERLEAVE": 1,
        "PAD_ID": -1,
        "TRITON_BLOCK_SIZE": 32,
    }
    return Launch((2, batch.size + 1), values, lambda after: {"slots": after["slot_mappings"], "tables": tables[0]})


@of("gpu.input_batch._prepare_prefill_inputs_kernel")
def prepare_prefill_inputs(random):
    batch = Batch(random)
    values = {
        "input_ids": torch.full((500,), POISON, dtype=torch.int32),
        "next_prefill_tokens": torch.full((3, ROOM), POISON, dtype=torch.int32),
        "num_lookahead": 3,
        "idx_mapping": batch.requests,
        "query_start_loc": batch.starts,
        "all_token_ids": batch.known,
        "prefill_lens": batch.prefill,
        "num_computed_tokens": batch.computed,
        "BLOCK_SIZE": 16,
        "LOOKAHEAD_BLOCK": 4,
    }
    return Launch((batch.size,), values)


@of("gpu.input_batch._prepare_pos_seq_lens_kernel")
def prepare_pos_seq_lens(random):
    batch = Batch(random)
    values = {
        "pos": torch.full((500,), POISON),
        "seq_lens": torch.full((ROOM,), POISON, dtype=torch.int32),
        "idx_mapping": batch.requests,
        "query_start_loc": batch.starts,
        "num_computed_tokens": batch.computed,
        "max_num_reqs": ROOM,
        "BLOCK_SIZE": 16,
    }
    return Launch((batch.size + 1,), values)


@of("gpu.input_batch._combine_sampled_and_draft_tokens_kernel")
def combine_sampled_and_draft_tokens(random):
    batch = Batch(random)
    sampled = int(ints(random, 0, 2, 1))
    counts = torch.minimum(ints(random, sampled, 4, batch.size), batch.lengths + ints(random, 0, 3, batch.size))
    lengths = batch.lengths + counts  # room for the drafts
    values = {
        "input_ids": torch.full((500,), POISON, dtype=torch.int32),
        "idx_mapping": batch.requests,
        "last_sampled_tokens": ints(random, 0, VOCABULARY, ROOM, 1, dtype=torch.int64),
        "query_start_loc": starts(lengths, padding=1),
        "seq_lens": (batch.computed[batch.requests] + lengths).int(),
        "prefill_len": batch.prefill,
        "draft_tokens": ints(random, 0, VOCABULARY, ROOM, 4, dtype=torch.int64),
        "cu_num_logits": starts(counts),
        "logits_indices": torch.full((int(counts.sum()),), POISON),
        "BLOCK_SIZE": 8,
        "NUM_NEW_SAMPLED_TOKENS": sampled,
    }
    return Launch((batch.size,), values)


@of("gpu.input_batch._get_num_sampled_and_rejected_kernel")
def get_num_sampled_and_rejected(random):
    rows = Rows(random)
    batch = rows.batch
    values = {
        "num_sampled": ints(random, 0, 4, batch.size),
        "num_rejected": torch.full((batch.size,), POISON, dtype=torch.int32),
        "seq_lens": batch.computed[batch.requests] + batch.lengths,
        "cu_num_logits": rows.starts,
        "idx_mapping": batch.requests,
        "prefill_len": batch.prefill,
    }
    return Launch((batch.size,), values)


@of("gpu.input_batch._post_update_kernel")
def post_update(random):
    batch = Batch(random)
    drafts = bool(ints(random, 0, 2, 1))
    values = {
        "idx_mapping": some(random, batch.requests, -1),
        "num_computed_tokens": batch.computed,
        "last_sampled_tokens": torch.full((ROOM, 1), POISON),
        "output_bin_counts": ints(random, 0, 3, ROOM, VOCABULARY) if ints(random, 0, 2, 1) else None,
        "sampled_tokens": ints(random, 0, 9, batch.size, 4, dtype=torch.int64),
        "num_sampled": ints(random, 0, 5, batch.size),
        "num_rejected": ints(random, 0, 2, batch.size),
        "query_start_loc": batch.starts[: batch.size + 1] if ints(random, 0, 2, 1) else None,
        "all_token_ids": batch.known,
        "total_len": batch.total,
        "draft_tokens": ints(random, 0, 9, batch.size, 3, dtype=torch.int64) if drafts else None,
        "draft_tokens_out": torch.full((ROOM, 3), POISON) if drafts else None,
        "num_draft_tokens": 3 if drafts else 0,
    }
    return Launch((batch.size,), values)


@of("gpu.input_batch._post_update_num_computed_tokens_kernel")
def post_update_num_computed_tokens(random):
    batch = Batch(random)
    values = {
        "idx_mapping": batch.requests,
        "num_computed_tokens": batch.computed,
        "query_start_loc": batch.starts,
    }
    return Launch((batch.size,), values)


@of("gpu.input_batch._expand_idx_mapping_kernel")
def expand_idx_mapping(random):
    rows = Rows(random)
    values = {
        "idx_mapping": rows.batch.requests,
        "expanded_idx_mapping": torch.full((rows.number + 2,), POISON),
        "expanded_local_pos": torch.full((rows.number + 2,), POISON, dtype=torch.int32),
        "cu_num_logits": rows.starts,
        "BLOCK_SIZE": 4,
    }
    return Launch((rows.batch.size,), values)


@of("gpu.structured_outputs._apply_grammar_bitmask_kernel")
def apply_grammar_bitmask(random):
    rows, stride = Rows(random), 3
    masked = torch.randperm(rows.batch.size * stride, generator=random)[:5].int()
    values = {
        "logits": rows.logits,
        "logits_indices": masked,
        "cu_num_logits": rows.starts,
        "bitmask": ints(random, -(2**31), 2**31, 5, math.ceil(VOCABULARY / 32)),
        "vocab_size": VOCABULARY,
        "MASK_STRIDE": stride,
        "BLOCK_SIZE": 64,
    }
    return Launch((5, math.ceil(VOCABULARY / 64)), values)


@of("gpu.sample.bad_words._bad_words_kernel")
def bad_words(random):
    rows = Rows(random)
    rows.batch.known %= 5  # so that words match
    lengths = ints(random, 1, 4, ROOM, 6)
    values = {
        "logits": rows.logits,
        "expanded_idx_mapping": rows.requests,
        "bad_word_token_ids": ints(random, 0, 5, ROOM, 18),
        "bad_word_offsets": torch.nn.functional.pad(lengths.cumsum(1), (1, 0)).int(),
        "num_bad_words": ints(random, 0, 7, ROOM),
        "all_token_ids": rows.batch.known,
        "prompt_len": rows.batch.prompt,
        "total_len": rows.batch.prompt + ints(random, 0, 9, ROOM),
        "input_ids": rows.inputs,
        "expanded_local_pos": rows.places,
    }
    return Launch((rows.number, 6), values)


@of("gpu.sample.gumbel._temperature_kernel")
def temperature(random):
    rows = Rows(random)
    values = {
        "logits": rows.logits,
        "expanded_idx_mapping": rows.requests,
        "temperature": ints(random, 0, 5, ROOM) / 2,
        "vocab_size": VOCABULARY,
        "BLOCK_SIZE": 64,
    }
    return Launch((rows.number, math.ceil(VOCABULARY / 64)), values)


@of("gpu.sample.gumbel._gumbel_sample_kernel")
def gumbel_sample(random):
    rows, blocks = Rows(random), math.ceil(VOCABULARY / 64)
    in_fp64 = bool(ints(random, 0, 2, 1))
    rows.logits[0, 1:] = -math.inf
    values = {
        "local_argmax": torch.full((rows.number, blocks), POISON),
        "local_max": torch.empty(rows.number, blocks, dtype=torch.float64 if in_fp64 else torch.float32),
        "logits_cache": None,
        "logits_cache_col": None,
        "logits_cache_source": None,
        "logits": rows.logits,
        "expanded_idx_mapping": rows.requests,
        "seeds": ints(random, -(2**62), 2**62, ROOM, dtype=torch.int64),
        "pos": ints(random, 0, LENGTH, rows.number, dtype=torch.int64),
        "temp": ints(random, 0, 5, ROOM) / 2,
        "vocab_size": VOCABULARY,
        "BLOCK_SIZE": 64,
        "IS_DRAFTING": False,
        "APPLY_TEMPERATURE": bool(ints(random, 0, 2, 1)),
        "USE_FP64": in_fp64,
        "PER_TOKEN_COL": False,
    }

    def drawn(after):
        best = after["local_max"].argmax(1, keepdim=True)
        return {"tokens": after["local_argmax"].gather(1, best), "scores": after["local_max"].amax(1)}

    return Launch((rows.number, blocks), values, drawn)


@of("gpu.sample.min_p._min_p_kernel")
def min_p(random):
    rows = Rows(random)
    values = {
        "logits": rows.logits,
        "expanded_idx_mapping": rows.requests,
        "min_p": ints(random, 0, 3, ROOM) / 10,
        "vocab_size": VOCABULARY,
        "BLOCK_SIZE": 64,
    }
    return Launch((rows.number,), values)


@of("gpu.sample.logit_bias._bias_kernel")
def bias(random):
    rows, checks = Rows(random), bool(ints(random, 0, 2, 1))
    distinct = torch.stack([torch.randperm(VOCABULARY, generator=random)[:8] for _ in range(3 * ROOM)]).int()
    rows.logits[::2, :-3] = -math.inf  # where stop tokens may be all that is left
    stops = distinct[2 * ROOM :]
    stops[:, :3] = torch.arange(VOCABULARY - 3, VOCABULARY)
    stops[:, 3:] = torch.arange(5)
    values = {
        "logits": rows.logits,
        "vocab_size": VOCABULARY,
        "expanded_idx_mapping": rows.requests,
        "num_allowed_token_ids": some(random, ints(random, 1, 9, ROOM), 0),
        "allowed_token_ids": distinct[:ROOM],
        "num_logit_bias": ints(random, 0, 9, ROOM),
        "bias_token_ids": distinct[ROOM : 2 * ROOM],
        "bias": floats(random, ROOM, 8),
        "pos": ints(random, 0, 20, rows.number, dtype=torch.int64),
        "min_lens": ints(random, 0, 30, ROOM),
        "num_stop_token_ids": ints(random, 0, 9, ROOM),
        "restore_when_all_masked": ints(random, 0, 2, ROOM),
        "stop_token_ids": stops,
        "BLOCK_SIZE": 8,
        "LOGITS_BLOCK_SIZE": 64,
        "CHECK_ALL_MASKED_ROWS": checks,
    }
    return Launch((rows.number,), values)


@of("gpu.sample.logprob._topk_log_softmax_kernel")
def topk_log_softmax(random):
    rows = Rows(random)
    rows.logits[0, 5:] = -math.inf
    values = {
        "output": torch.empty(rows.number, 7),
        "logits": rows.logits,
        "topk_ids": ints(random, 0, VOCABULARY, rows.number, 7, dtype=torch.int64),
        "topk": 7,
        "vocab_size": VOCABULARY,
        "BLOCK_SIZE": 64,
        "TOPK_BLOCK_SIZE": 4,
    }
    return Launch((rows.number,), values)


@of("gpu.sample.logprob._ranks_kernel")
def ranks(random):
    rows = Rows(random)
    values = {
        "output": torch.full((rows.number,), POISON),
        "logits": rows.logits.round(),  # with ties
        "token_ids": ints(random, 0, VOCABULARY, rows.number, dtype=torch.int64),
        "vocab_size": VOCABULARY,
        "BLOCK_SIZE": 64,
    }
    return Launch((rows.number,), values)


@of("gpu.sample.logprob._fill_logprob_token_ids_kernel")
def fill_logprob_token_ids(random):
    rows, likeliest = Rows(random), int(ints(random, 0, 5, 1))
    own = ints(random, 0, VOCABULARY, ROOM, 8)
    values = {
        "out_token_ids": torch.zeros(rows.number, 9, dtype=torch.int64),
        "out_valid_mask": torch.zeros(rows.number, 9, dtype=torch.bool),
        "sampled_token_ids": ints(random, 0, VOCABULARY, rows.number, dtype=torch.int64),
        "topk_indices": ints(random, 0, VOCABULARY, rows.number, likeliest) if likeliest else own,
        "expanded_idx_mapping": rows.requests,
        "num_per_req_token_ids": some(random, ints(random, 1, 9, ROOM), 0),
        "per_req_token_ids": own,
        "NUM_TOPK": likeliest,
        "PADDED_COLS": 8,
    }
    return Launch((rows.number,), values)


@of("gpu.sample.output._compact_sampling_mask_kernel")
def compact_sampling_mask(random):
    batch, kept, name = Batch(random), 12, f"{WORKER}gpu.sample.output._compact_sampling_mask_kernel"
    several = bool(ints(random, 0, 2, 1)) and "ROWS_PER_REQUEST" in parameters(find(name))  # since 0.32
    of_request = 3 if several else 1
    number = batch.size * of_request
    logits = some(random, floats(random, number, VOCABULARY), -math.inf)
    logits[::2, 10:] = -math.inf
    sampled = ints(random, 0, of_request + 1, batch.size)
    values = {
        "logits": logits,
        "cu_num_logits": (torch.arange(batch.size + 1) * of_request).int(),
        "num_sampled_tokens": sampled,
        "token_ids": torch.full((number, kept), POISON, dtype=torch.int32),
        "packed_mask": torch.zeros(number, math.ceil(VOCABULARY / 8), dtype=torch.uint8),
        "counts": torch.full((number,), POISON, dtype=torch.int32),
        "vocab_size": VOCABULARY,
        "max_num_kept": kept,
        "ROWS_PER_REQUEST": of_request,
        "BLOCK_SIZE": 64,
    }
    return Launch((number,), values)


@of("gpu.sample.penalties._penalties_kernel")
def penalties(random):
    rows = Rows(random)
    values = {
        "logits": rows.logits,
        "expanded_idx_mapping": rows.requests,
        "token_ids": rows.inputs,
        "expanded_local_pos": rows.places,
        "repetition_penalty": some(random, floats(random, ROOM).abs() + 0.1, 1.0),
        "frequency_penalty": some(random, floats(random, ROOM), 0.0),
        "presence_penalty": some(random, floats(random, ROOM), 0.0),
        "prompt_bin_mask": ints(random, -(2**31), 2**31, ROOM, math.ceil(VOCABULARY / 32)),
        "output_bin_counts": some(random, ints(random, 1, 5, ROOM, VOCABULARY), 0),
        "vocab_size": VOCABULARY,
        "BLOCK_SIZE": 64,
    }
    return Launch((rows.number, math.ceil(VOCABULARY / 64)), values)


@of("gpu.sample.penalties._bincount_kernel")
def bincount(random):
    batch = Batch(random)
    values = {
        "expanded_idx_mapping": batch.requests,
        "all_token_ids": batch.known,
        "prompt_len": batch.prompt,
        "prefill_len": batch.prefill,
        "prompt_bin_mask": torch.zeros(ROOM, math.ceil(VOCABULARY / 32), dtype=torch.int32),
        "output_bin_counts": torch.zeros(ROOM, VOCABULARY, dtype=torch.int32),
        "BLOCK_SIZE": 16,
    }
    return Launch((batch.size, math.ceil(LENGTH / 16)), values)


@of("gpu.sample.prompt_logprob._prompt_logprobs_token_ids_kernel")
def prompt_logprobs_token_ids(random):
    batch = Batch(random)
    values = {
        "prompt_logprobs_token_ids": torch.full((500,), POISON),
        "query_start_loc": batch.starts,
        "idx_mapping": batch.requests,
        "num_computed_tokens": batch.computed,
        "all_token_ids": batch.known,
        "BLOCK_SIZE": 16,
    }
    return Launch((batch.size,), values)


def _thinking(random) -> tuple[Rows, dict]:
    rows = Rows(random)
    rows.batch.known %= 4  # so that markers match
    return rows, {
        "thinking_token_budget": ints(random, -1, 12, ROOM),
        "all_token_ids": rows.batch.known,
        "total_len": rows.batch.total,
        "reasoning_start_token_ids": torch.tensor([1, 2], dtype=torch.int32),
        "natural_reasoning_end_token_ids": torch.tensor([3, 0, 1], dtype=torch.int32),
        "START_LEN": 2,
        "NATURAL_END_LEN": 3,
    }


@of("gpu.sample.thinking_budget._update_committed_marker_cache_kernel")
def update_committed_marker_cache(random):
    rows, values = _thinking(random)
    values |= {
        "req_ids": rows.batch.requests,
        "cached_last_start": torch.full((ROOM,), -1, dtype=torch.int32),
        "cached_last_end": torch.full((ROOM,), -1, dtype=torch.int32),
        "cached_scan_pos": some(random, ints(random, 1, LENGTH, ROOM), 0),
        "MAX_LEN": 3,
        "BLOCK": 16,
    }
    first_search = (values["cached_scan_pos"] == 0) | (values["cached_scan_pos"] > rows.batch.total)

    def compared(after):
        """The first search may stop at the last marker of all. Where it found one, only their order matters."""
        begin, end = after["cached_last_start"], after["cached_last_end"]
        return {
            "thinks": begin > end,
            "start": torch.where(first_search & (begin <= end), -1, begin),
            "end": torch.where(first_search & (begin > end), -1, end),
            "searched": after["cached_scan_pos"],
        }

    return Launch((rows.batch.size,), values, compared)


@of("gpu.sample.thinking_budget._thinking_budget_kernel")
def thinking_budget(random):
    rows, values = _thinking(random)
    length, begin = rows.batch.total, ints(random, -1, 6, ROOM)
    values |= {
        "logits": rows.logits,
        "expanded_idx_mapping": rows.requests,
        "input_ids": rows.inputs % 4,
        "expanded_local_pos": rows.places,
        "cached_last_start": torch.where(begin < 0, -1, (length - 8 + begin).clamp(min=-1)),
        "cached_last_end": some(random, (length - ints(random, 4, 9, ROOM)).clamp(min=-1), -1),
        "reasoning_end_token_ids": torch.tensor([3, 0, 3, 1], dtype=torch.int32),
        "END_LEN": 4,
    }
    return Launch((rows.number,), values)


@of("gpu.sample.trace_replay._trace_replay_kernel")
def trace_replay(random):
    batch = Batch(random)
    values = {
        "sampled": torch.full((batch.size,), POISON),
        "idx_mapping": some(random, batch.requests, -1),
        "trace_token_ids": ints(random, 0, VOCABULARY, ROOM, 9),
        "trace_len": ints(random, 0, 10, ROOM),
        "total_len": batch.prompt + ints(random, -1, 9, ROOM),
        "prompt_len": batch.prompt,
    }
    return Launch((batch.size,), values)


@of("gpu.metrics.logits._num_nans_kernel")
def num_nans(random):
    rows = Rows(random)
    values = {
        "logits": some(random, rows.logits, math.nan),
        "num_nans": torch.full((rows.number,), POISON, dtype=torch.int32),
        "vocab_size": VOCABULARY,
        "BLOCK_SIZE": 64,
    }
    return Launch((rows.number,), values)


def launches(kernel: str) -> list[Launch]:
    """The same random launches in every process."""
    return [LAUNCHES[kernel](torch.Generator().manual_seed(seed)) for seed in range(TRIALS)]


def main() -> None:
    from vllm.triton_utils import HAS_TRITON

    assert HAS_TRITON and os.environ["TRITON_INTERPRET"] == "1"
    # The interpreter has no functions of CUDA's library.
    find(f"{WORKER}gpu.metrics.logits").libdevice = SimpleNamespace(isnan=lambda scores: scores != scores)
    results = {}
    for name in LAUNCHES:
        kernel = find(name)
        results[name] = [launch.run(kernel, parameters(kernel)) for launch in launches(name)]
    torch.save(results, sys.argv[1])


if __name__ == "__main__":
    main()
