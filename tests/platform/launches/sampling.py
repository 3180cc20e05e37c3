"""Kernels that draw tokens, and that say how likely tokens are."""

import math

import torch

from launches._launch import (
    LENGTH,
    POISON,
    ROOM,
    VOCABULARY,
    WORKER,
    Batch,
    Launch,
    Rows,
    floats,
    ints,
    of,
    some,
)
from vllm_opset.platform.bridges import find
from vllm_opset.platform.runner_kernels import parameters


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
    logits = some(random, floats(random, number, VOCABULARY + 3), -math.inf)  # padded
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
