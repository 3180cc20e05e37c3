"""The kernel of `vllm.v1.worker.gpu.buffer_utils`."""

import torch

from vllm_opset.platform.npu.runner_kernels._pointers import pointed_at
from vllm_opset.platform.npu.runner_kernels._registry import implements
from vllm_opset.platform.npu.runner_kernels._rows import ragged


@implements("gpu.buffer_utils._apply_write_kernel")
def apply_write(
    output: torch.Tensor,
    write_indices: torch.Tensor,
    write_starts: torch.Tensor,
    write_contents: torch.Tensor,
    write_cu_lens: torch.Tensor,
    write_group_ids: torch.Tensor | None,
    MULTI_GROUP: bool,
) -> None:
    """Write pieces of contents into rows of a tensor, or of one int32 tensor for each group.

    output: the tensor, or what points at the groups' tensors.
    write_indices, write_starts: row and first column of each write. write_cu_lens: the end of each write's contents.
    """
    writes, places = ragged(torch.nn.functional.pad(write_cu_lens, (1, 0)), len(write_contents))
    rows, columns = write_indices[writes].long(), write_starts[writes] + places
    if not MULTI_GROUP:
        output.view(len(output), -1)[rows, columns] = write_contents
        return
    groups = write_group_ids[writes]
    for group, table in enumerate(pointed_at(output)):
        other, flat = groups != group, table.view(-1)
        first = (rows * table.stride(0) + columns).masked_fill_(other, 0)
        # Contents of other groups add 0 to the first element, which another of the writes may change.
        flat.index_add_(0, first, (write_contents - flat[first]).masked_fill_(other, 0))
