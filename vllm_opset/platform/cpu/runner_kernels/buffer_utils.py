"""The kernel of `vllm.v1.worker.gpu.buffer_utils`."""

import torch

from vllm_opset.platform.cpu.runner_kernels._memory import int32_at
from vllm_opset.platform.cpu.runner_kernels._registry import implements


@implements("gpu.buffer_utils._apply_write_kernel")
def apply_write(
    output: torch.Tensor,
    output_stride: torch.Tensor | int,
    write_indices: torch.Tensor,
    write_starts: torch.Tensor,
    write_contents: torch.Tensor,
    write_cu_lens: torch.Tensor,
    write_group_ids: torch.Tensor | None,
    MULTI_GROUP: bool,
) -> None:
    """Write pieces of contents into rows of a tensor, or of one int32 tensor for each group.

    output: the tensor, or uint64 addresses [num_groups], with the strides of rows in elements [num_groups].
    write_indices, write_starts: row and first column of each write. write_cu_lens: the end of each write's contents.
    """
    contents, begin = write_contents.numpy(), 0
    flat = None if MULTI_GROUP else output.view(-1).numpy()
    for write, (row, start, end) in enumerate(
        zip(write_indices.tolist(), write_starts.tolist(), write_cu_lens.tolist(), strict=True)
    ):
        length = end - begin
        if MULTI_GROUP:
            group = int(write_group_ids[write])
            first = row * int(output_stride[group]) + start
            int32_at(output.tolist()[group] + first * contents.itemsize, length)[:] = contents[begin:end]
        else:
            first = row * output_stride + start
            flat[first : first + length] = contents[begin:end]
        begin = end
