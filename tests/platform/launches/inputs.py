"""Kernels that prepare a step's inputs, and that keep the state of requests between steps."""

import torch

from launches._launch import LENGTH, POISON, ROOM, VOCABULARY, Batch, Launch, Rows, addresses, ints, of, some, starts


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


@of("gpu.mm.rope._prepare_rope_positions_kernel")
def prepare_rope_positions(random):
    batch, components = Batch(random), 3
    values = {
        "positions": torch.full((components, 500), POISON),
        "prefill_positions": ints(random, 0, LENGTH, ROOM * components, LENGTH),
        "prefill_positions_stride0": components * LENGTH,
        "prefill_positions_stride1": LENGTH,
        "prefill_delta": ints(random, -40, 1, ROOM),
        "idx_mapping": batch.requests,
        "query_start_loc": batch.starts,
        "prefill_lens": batch.prefill,
        "num_computed_tokens": batch.computed,
        "BLOCK_SIZE": 16,
        "NUM_DIMS": components,
    }
    return Launch((batch.size,), values)


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
