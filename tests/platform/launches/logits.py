"""Kernels that change the logits before a token is drawn, as parameters of requests ask."""

import math

import torch

from launches._launch import LENGTH, ROOM, VOCABULARY, Batch, Launch, Rows, floats, ints, of, some


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
