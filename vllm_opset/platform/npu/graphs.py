"""ACL graphs of steps of decode, which vLLM captures and replays as CUDA graphs. Off unless asked for; never run on
hardware.

`compat.name_npu_as_cuda` gives vLLM's wrapper of graphs these two for torch.cuda's. Everything that a step brings anew
lies in vLLM's own tensors, but for the lengths, which attention's operators take from the host: torch_npu keeps each of
their calls in a group of its own, and launches it anew with what `NPUGraph.update` is given.
"""

from typing import Any

import torch
from vllm.forward_context import get_forward_context

# vLLM fills a batch up to the size that was captured with requests of no length, which all have a query in the graph.
# ATB's attention refuses lengths of zero, and the documents of the other do not speak of them. So each is given one
# key, the first of the block that vLLM names for them and keeps free; what it attends to is never looked at.
PADDED_LENGTH = 1


class DecodeGraph(torch.npu.NPUGraph):
    """One captured size of batch."""

    def __init__(self) -> None:
        super().__init__()
        self.replayed = torch.npu.Event()

    def replay(self) -> None:
        """Runs the graph with the lengths of the step that vLLM is about to run."""
        # The last replay may still run, and would take the new lengths for its own.
        self.replayed.synchronize()
        self.update(cpu_update_input=[new_lengths()])
        super().replay()
        self.replayed.record()


def capture(graph: DecodeGraph, *, pool: Any, stream: Any) -> torch.npu.graph:
    """The stream is not used: where vLLM has its own account of streams, an NPU's are not in it."""
    return torch.npu.graph(graph, pool=pool, auto_dispatch_capture=True)


def new_lengths() -> dict[str, Any]:
    """How many keys each request of the step has, by the names of the operators' parameters.

    The same in all layers: what vLLM derives from the batch for some of them, as for attention in chunks, it does not
    capture (`AttentionMetadataBuilder.get_cudagraph_support`).
    """
    metadata = next(iter(get_forward_context().attn_metadata.values()))
    _, seq_lens = metadata.batch.host_lengths()
    lengths = [max(length, PADDED_LENGTH) for length in seq_lens]
    return {"actual_seq_lengths_kv": lengths, "context_lens": torch.tensor(lengths, dtype=torch.int32)}
