"""The capture of a function in a CUDA graph, beside the graphs that vLLM captures."""

from collections.abc import Callable

import torch


def captured(
    run: Callable[[], torch.Tensor], pool, stream: torch.cuda.Stream
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of `run`, and the tensor that it writes.

    pool: vLLM's pool of memory. If the capture allocates the tensor, the next replay of another graph in the pool may
    overwrite it. stream: one for all graphs, because PyTorch keeps memory for matrix products on each.
    """
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())  # which may still write what the function reads
    with torch.cuda.stream(stream):
        run()  # compiles the kernels, and makes what they keep for this stream
    with torch.cuda.graph(graph, pool, stream=stream):
        written = run()
    return graph, written
