"""A GPU's view of pinned memory, without vLLM's compiled operator for it."""

import torch


class _PinnedMemory:
    """Pinned memory as CUDA libraries pass memory to each other. PyTorch keeps this object as long as its view.

    CUDA's unified virtual addressing gives pinned memory one address on the host and on every GPU.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._keeps_memory = tensor
        self.__cuda_array_interface__ = tensor.numpy().__array_interface__


def view_on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """The current GPU's view of a CPU tensor in pinned memory, of the same shape, strides and dtype.

    Raises RuntimeError for memory that is not pinned, which a GPU cannot address. There is no memory to view if the
    tensor has no elements.
    """
    if not tensor.numel():
        return tensor.to("cuda")
    if not tensor.is_pinned():
        raise RuntimeError("a GPU cannot view this tensor, because its memory is not pinned")
    view = torch.as_tensor(_PinnedMemory(tensor), device="cuda")
    assert view.data_ptr() == tensor.data_ptr(), "PyTorch copied the memory instead of viewing it"
    return view
