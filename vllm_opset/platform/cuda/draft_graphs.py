"""CUDA graphs of a draft model, for steps in which each request has the same number of tokens.

A draft model of vLLM runs once for each token that it drafts. Up to 0.33, vLLM captures none of these runs, and the GPU
waits for Python, which launches each kernel. Here, graphs replay these runs. The first run of a step has the tokens
that the model verified, and one more for each request. Each further run has one token of each request. The first run of
a step with prompts takes vLLM's own way.

vLLM sizes the KV cache before these graphs are captured, and does not count their memory. The largest run takes memory
of its own, too: memory of vLLM's pool is reused on one stream alone, and vLLM captures on another stream.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu_worker import Worker

from vllm_opset.attention.backend import OpsetAttentionBackend
from vllm_opset.attention.metadata import OpsetMetadata
from vllm_opset.platform import second_runner
from vllm_opset.platform.cuda.capturing import captured


def capture(worker: Worker) -> None:
    """Capture the graphs if the engine allows them. Call it when vLLM has captured its own."""
    if second_runner.draft_by.bridge.needed() and _may_capture(worker):
        runner = worker.model_runner
        graphs = DraftGraphs(runner.speculator, _sizes(worker.vllm_config), runner.cudagraph_manager.pool)
        second_runner.draft_by(runner.speculator, graphs.run_model)


def drop(worker: Worker) -> None:
    """Let go of the graphs. Call it before vLLM ends its runner, whose graphs share their pool of memory."""
    speculator = getattr(getattr(worker, "model_runner", None), "speculator", None)  # None if the start failed
    if speculator is not None:
        vars(speculator).pop("_run_model", None)


def _may_capture(worker: Worker) -> bool:
    """Whether a draft model drafts, in one process, with opset's attention, and decode steps have full graphs.

    Adapters have graphs of their own kinds, and vLLM has a pool of its own for graphs whose memory sleeps. Its kernels
    for quantised weights keep memory for each stream, and after its own captures it allows no more of that.
    """
    from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

    config, speculator = worker.vllm_config, getattr(worker.model_runner, "speculator", None)
    return (
        type(speculator) is StandaloneARSpeculator
        and config.compilation_config.cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        and config.parallel_config.world_size_across_dp == 1
        and config.lora_config is None
        and not config.speculative_config.enforce_eager
        and config.speculative_config.draft_model_config.quantization is None
        and not config.model_config.enable_sleep_mode
        # vLLM derives further backends from this one, which write to buffers of their own.
        and all(group.backend is OpsetAttentionBackend for groups in speculator.attn_groups for group in groups)
    )


def _sizes(config: VllmConfig) -> list[int]:
    """The numbers of requests to capture: those of the decode steps that vLLM captures, and the most requests.

    vLLM's sizes are numbers of tokens, of which a request has one more than drafts. In the draft model's first run it
    has two more. vLLM plans no step of more tokens than the scheduler's limit.
    """
    scheduler, sizes = config.scheduler_config, config.compilation_config.cudagraph_capture_sizes
    tokens = config.speculative_config.num_speculative_tokens + 1
    captured_requests = max(sizes, default=0) // tokens
    most = min(scheduler.max_num_seqs, captured_requests, scheduler.max_num_batched_tokens // (tokens + 1))
    counts = {-(-size // tokens) for size in sizes}
    return [*sorted(count for count in counts if count < most), *([most] if most else [])]


class DraftGraphs:
    """Graphs of the runs of a `StandaloneARSpeculator`, by a request's tokens and the number of requests.

    sizes: numbers of requests to capture. pool: vLLM's pool of memory for graphs.
    """

    def __init__(self, speculator, sizes: Sequence[int], pool) -> None:
        self._speculator, self._run, self._pool = speculator, speculator._run_model, pool
        self._stream = torch.cuda.Stream()
        buffers, tables = speculator.input_buffers, speculator.block_tables
        # A request's tokens, and the buffers that hold token ids, positions and slots.
        self._inputs = {
            speculator.num_speculative_steps + 2: (
                speculator.expanded_input_ids,
                speculator.expanded_positions,
                speculator.expanded_slot_mappings,
            )
        }
        if speculator.num_speculative_steps > 1:
            self._inputs[1] = buffers.input_ids, buffers.positions, tables.slot_mappings
        self._hidden_states: torch.Tensor | None = None
        self._graphs = {
            query_len: {size: self._capture(size, query_len) for size in sorted(sizes, reverse=True)}
            for query_len in self._inputs
        }

    @torch.inference_mode()
    def _capture(self, num_reqs: int, query_len: int) -> torch.cuda.CUDAGraph:
        """A graph that writes to the first rows of `_hidden_states`.

        The run before the first capture, which is the largest one, allocates that tensor. So it is not in the pool, and
        vLLM's graphs do not overwrite it.
        """
        num_tokens = num_reqs * query_len
        ids, positions, slots = self._inputs[query_len]
        slots.fill_(PAD_SLOT_ID)
        metadata, slots_by_layer = self._metadata(num_reqs, query_len, slots[:, :num_tokens])

        def run() -> torch.Tensor:
            for one in metadata.values():
                one.batch.forget()  # what the kernels derive from the batch must be captured, too
            found = self._run(ids[:num_tokens], positions[:num_tokens], metadata, slots_by_layer, None)
            if self._hidden_states is None:
                self._hidden_states = torch.empty_like(found)
            return self._hidden_states[:num_tokens].copy_(found)

        return captured(run, self._pool, self._stream)[0]

    def _metadata(
        self, num_reqs: int, query_len: int, slots: torch.Tensor
    ) -> tuple[Mapping[str, OpsetMetadata], Mapping[str, torch.Tensor]]:
        """Metadata as vLLM builds it in a step, and the slots of each layer. The requests have no earlier tokens."""
        from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
        from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

        speculator = self._speculator
        starts = np.arange(num_reqs + 1, dtype=np.int32) * query_len
        speculator.input_buffers.query_start_loc[: num_reqs + 1] = torch.from_numpy(starts)
        speculator.input_buffers.seq_lens[:num_reqs] = query_len
        speculator.block_tables.get_dummy_block_tables(num_reqs)
        metadata = speculator._build_attn_metadata(
            num_reqs=num_reqs,
            batch_desc=BatchExecutionDescriptor(CUDAGraphMode.FULL, num_reqs * query_len, num_reqs, query_len),
            query_start_loc_np=starts,
            seq_lens_cpu_upper_bound=torch.full((num_reqs,), query_len, dtype=torch.int32),
            step=0,
            slot_mappings=slots,
        )
        return metadata, build_slot_mappings_by_layer(slots, speculator.kv_cache_config)

    def run_model(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attn_metadata: Mapping[str, OpsetMetadata] | None,
        slot_mappings: Mapping[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
    ) -> torch.Tensor:
        """vLLM's method `_run_model` of its draft model's speculator."""
        num_tokens = input_ids.shape[0]
        num_reqs, query_len = _shape(attn_metadata, num_tokens)
        size = next((size for size in reversed(self._graphs.get(query_len, {})) if size >= num_reqs), None)
        if size is None:
            return self._run(input_ids, positions, attn_metadata, slot_mappings, num_tokens_across_dp)
        # So that padded requests have no tokens. vLLM has set their seq_lens to zero in the first run, and pads slots.
        self._speculator.input_buffers.query_start_loc[num_reqs + 1 : size + 1] = num_tokens
        self._graphs[query_len][size].replay()
        return self._hidden_states[:num_tokens]


def _shape(metadata: Mapping[str, OpsetMetadata] | None, num_tokens: int) -> tuple[int, int]:
    """The number of requests, and the tokens of each; zeros if it differs, or if no layer attends."""
    if not metadata:
        return 0, 0
    batch = next(iter(metadata.values())).batch
    num_reqs = batch.seq_lens.shape[0]
    return (num_reqs, batch.max_query_len) if num_reqs * batch.max_query_len == num_tokens else (0, 0)
