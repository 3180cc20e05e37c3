"""A patch of the batch of requests that vLLM's first model runner keeps."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_opset.platform.bridges import WITHOUT_KERNELS, has, patch, uses, wrap_once

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_input_batch import InputBatch

INPUT_BATCH = "vllm.v1.worker.gpu_input_batch.InputBatch"


def _leaves_moved_rows() -> bool:
    """Whether vLLM leaves a request's allowed tokens in the row that it moved the request from."""
    return has(INPUT_BATCH)() and not uses(f"{INPUT_BATCH}.condense", "fill_")()


@patch(
    _leaves_moved_rows,
    last=(0, 30),
    changes=(f"{INPUT_BATCH}.swap_states", f"{INPUT_BATCH}.condense"),
    worker=WITHOUT_KERNELS,
)
def keep_allowed_tokens_apart() -> None:
    """Apply the `allowed_token_ids` of a request to this request alone.

    The batch has a mask with a row of allowed tokens for each request. When vLLM swaps two requests, it swaps views of
    their rows, so both rows become equal. When it moves the last request into an empty row, it leaves the mask's row
    behind, and the next request in that row gets it. vLLM 0.31 copies the rows, and clears the one that it leaves.
    """
    from vllm.v1.worker.gpu_input_batch import InputBatch

    wrap_once(InputBatch, "swap_states", _with_copied_rows)
    wrap_once(InputBatch, "condense", _with_cleared_rows)


def _with_copied_rows(swap: Callable) -> Callable:
    def swapped(batch: "InputBatch", i1: int, i2: int) -> None:
        mask = batch.allowed_token_ids_mask_cpu_tensor
        rows = None if mask is None else mask[[i2, i1]]
        swap(batch, i1, i2)
        if rows is not None:
            mask[[i1, i2]] = rows

    return swapped


def _with_cleared_rows(condense: Callable) -> Callable:
    def condensed(batch: "InputBatch") -> None:
        num_rows = len(batch._req_ids)
        condense(batch)
        if batch.allowed_token_ids_mask_cpu_tensor is not None:
            batch.allowed_token_ids_mask_cpu_tensor[batch.num_reqs : num_rows] = False

    return condensed
