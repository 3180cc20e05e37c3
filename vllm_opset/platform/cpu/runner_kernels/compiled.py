"""The kernels that every step launches, in C++ (`kernels/cpp/runner_steps.cpp`). They do what their namesakes here do.

A call of one takes a few microseconds. In NumPy it takes ten times as many, most of it for a dozen small operations.
Without a compiler this module is not imported, and the functions in NumPy serve.
"""

import torch

from vllm_opset.kernels.cpp._build import INT, POINTER, function
from vllm_opset.platform.cpu.runner_kernels import input_batch
from vllm_opset.platform.cpu.runner_kernels._registry import implements

REQUESTS = (POINTER, INT, INT)


def address(tensor: torch.Tensor, dtype: torch.dtype = torch.int32) -> int:
    """Where a tensor's elements are. Raises TypeError if they are not of this type."""
    if tensor.dtype is not dtype:
        raise TypeError(f"a kernel of vLLM's second model runner expects {dtype}, not {tensor.dtype}")
    return tensor.data_ptr()


def of_requests(idx_mapping: torch.Tensor) -> tuple[int, int, int]:
    """The arguments for the requests of a batch: where they are, the bytes of each, and how many."""
    return idx_mapping.data_ptr(), idx_mapping.element_size(), idx_mapping.shape[0]


_pos_seq_lens = function("prepare_pos_seq_lens", *REQUESTS, *[POINTER] * 4, INT)
_combine = function("combine_sampled_and_draft_tokens", *REQUESTS, *[POINTER] * 6, INT, POINTER, POINTER, INT)
_sampled_and_rejected = function("get_num_sampled_and_rejected", *REQUESTS, *[POINTER] * 5)
_post_update = function("post_update", *REQUESTS, *[POINTER] * 3, INT, POINTER, INT, INT, *[POINTER] * 4, INT, POINTER)
_gather = function("gather_block_tables", *REQUESTS, *[POINTER] * 4, INT, INT, *[POINTER] * 3)
_slots = function("compute_slot_mappings", *REQUESTS, *[POINTER] * 7, INT, INT, INT)


@implements("gpu.input_batch._prepare_pos_seq_lens_kernel", ignores="max_num_reqs", compiled=True)
def prepare_pos_seq_lens(pos, seq_lens, idx_mapping, query_start_loc, num_computed_tokens) -> None:
    _pos_seq_lens(
        *of_requests(idx_mapping), address(pos, torch.int64), address(seq_lens), address(query_start_loc),
        address(num_computed_tokens), seq_lens.shape[0],
    )  # fmt: skip


@implements("gpu.input_batch._combine_sampled_and_draft_tokens_kernel", compiled=True)
def combine_sampled_and_draft_tokens(
    input_ids, idx_mapping, last_sampled_tokens, query_start_loc, seq_lens, prefill_len, draft_tokens,
    cu_num_logits, logits_indices, NUM_NEW_SAMPLED_TOKENS=1,
) -> None:  # fmt: skip
    _combine(
        *of_requests(idx_mapping), address(input_ids), address(last_sampled_tokens, torch.int64),
        address(query_start_loc), address(seq_lens), address(prefill_len), address(draft_tokens, torch.int64),
        draft_tokens.stride(0), address(cu_num_logits), address(logits_indices, torch.int64),
        NUM_NEW_SAMPLED_TOKENS,
    )  # fmt: skip


@implements("gpu.input_batch._get_num_sampled_and_rejected_kernel", compiled=True)
def get_num_sampled_and_rejected(num_sampled, num_rejected, seq_lens, cu_num_logits, idx_mapping, prefill_len) -> None:
    _sampled_and_rejected(
        *of_requests(idx_mapping), address(num_sampled), address(num_rejected), address(seq_lens),
        address(cu_num_logits), address(prefill_len),
    )  # fmt: skip


@implements("gpu.input_batch._post_update_kernel", ignores="num_draft_tokens", compiled=True)
def post_update(
    idx_mapping, num_computed_tokens, last_sampled_tokens, output_bin_counts, sampled_tokens, num_sampled,
    num_rejected, query_start_loc, all_token_ids, total_len, draft_tokens=None, draft_tokens_out=None,
) -> None:  # fmt: skip
    counts = output_bin_counts
    if draft_tokens is not None:
        input_batch.keep_drafts(idx_mapping, draft_tokens, draft_tokens_out)
    _post_update(
        *of_requests(idx_mapping), address(num_computed_tokens), address(last_sampled_tokens, torch.int64),
        None if counts is None else address(counts), 0 if counts is None else counts.stride(0),
        address(sampled_tokens, torch.int64), sampled_tokens.stride(0), sampled_tokens.shape[1],
        address(num_sampled), address(num_rejected),
        None if query_start_loc is None else address(query_start_loc),
        address(all_token_ids), all_token_ids.stride(0), address(total_len),
    )  # fmt: skip


@implements("gpu.block_table._gather_block_tables_kernel", compiled=True)
def gather_block_tables(
    batch_idx_to_req_idx, src_block_table_ptrs, dst_block_table_ptrs, block_table_strides, num_blocks, num_reqs,
    num_computed_tokens=None, sliding_window_reach=None, block_sizes=None, MASK_SLIDING_WINDOW=False,
) -> None:  # fmt: skip
    of_window = (num_computed_tokens, sliding_window_reach, block_sizes)
    _gather(
        *of_requests(batch_idx_to_req_idx)[:2], num_reqs, address(src_block_table_ptrs, torch.uint64),
        address(dst_block_table_ptrs, torch.uint64), address(block_table_strides, torch.int64),
        address(num_blocks), *num_blocks.shape,
        *(map(address, of_window) if MASK_SLIDING_WINDOW else (None, None, None)),
    )  # fmt: skip


@implements(
    "gpu.block_table._compute_slot_mappings_kernel",
    ignores="max_num_tokens cp_rank CP_INTERLEAVE dcp_sharded",
    compiled=True,
)
def compute_slot_mappings(
    idx_mapping, query_start_loc, pos, block_table_ptrs, block_table_strides, block_sizes, slot_mapping_enabled,
    slot_mappings, CP_SIZE, PAD_ID, kernel_block_sizes=None,
) -> None:  # fmt: skip
    assert CP_SIZE == 1
    _slots(
        *of_requests(idx_mapping), address(query_start_loc), address(pos, torch.int64),
        address(block_table_ptrs, torch.uint64), address(block_table_strides, torch.int64),
        address(block_sizes if kernel_block_sizes is None else kernel_block_sizes),
        address(slot_mapping_enabled, torch.bool), address(slot_mappings, torch.int64), *slot_mappings.shape,
        PAD_ID,
    )  # fmt: skip
