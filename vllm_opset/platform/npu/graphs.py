"""ACL graphs of decode steps, which vLLM captures and replays as CUDA graphs.

They are off unless users ask for them, and they have never run on hardware. `compat.name_npu_as_cuda` replaces
torch.cuda's graph class and capture function by the two here, for both of vLLM's model runners. vLLM's own tensors hold
all new data of a step except the lengths. Attention operators take the lengths from the host. So torch_npu keeps each
attention call in a group of its own, and launches it again with the arguments of `NPUGraph.update`.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.forward_context import get_forward_context

# vLLM pads a batch to the captured size with requests of length 0, each of which has a query in the graph. ATB's
# attention refuses lengths of 0, and the documents of the other operator do not mention them. So each padding request
# gets one key: the first of the block that vLLM reserves for padding. Nobody reads its output.
PADDED_LENGTH = 1


def in_forward_context() -> list[int]:
    """The number of keys of each request in the step whose context vLLM's first model runner has set.

    It is the same in all layers. vLLM derives other lengths for some layers, such as chunked attention, but does not
    capture those (`AttentionMetadataBuilder.get_cudagraph_support`).
    """
    metadata = next(iter(get_forward_context().attn_metadata.values()))
    return metadata.batch.host_lengths()[1]


class DecodeGraph(torch.npu.NPUGraph):
    """A graph for one captured batch size.

    seq_lens: a function that returns the number of keys of each request in the next step. vLLM's second model runner
    sets no forward context for a graph. So opset's runner replaces this function after the capture.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seq_lens: Callable[[], list[int]] = in_forward_context
        self.replayed = torch.npu.Event()

    def replay(self) -> None:
        """Replay the graph with the lengths of the step."""
        # The previous replay may still run, and would read the new lengths.
        self.replayed.synchronize()
        self.update(cpu_update_input=[new_lengths(self.seq_lens())])
        super().replay()
        self.replayed.record()


def capture(graph: DecodeGraph, pool: Any, *, stream: Any) -> torch.npu.graph:
    """A capture context. The stream is ignored: where vLLM keeps its own account of streams, an NPU's are not in it."""
    return torch.npu.graph(graph, pool=pool, auto_dispatch_capture=True)


def new_lengths(seq_lens: list[int]) -> dict[str, Any]:
    """The number of keys of each request, by the names of the operators' parameters."""
    lengths = [max(length, PADDED_LENGTH) for length in seq_lens]
    return {"actual_seq_lengths_kv": lengths, "context_lens": torch.tensor(lengths, dtype=torch.int32)}
