"""Decode steps of a model, recorded, and made again without the Python code between their kernels.

A decode step of few requests calls hundreds of kernels, which take some microseconds each. The Python code around them
takes as long: torch.nn.Module, vLLM's layers, and the checks of arguments. vLLM's runners keep the inputs of a step at
the same addresses. So steps with the same number of requests make the same calls.

Whether a model's code does the same in each such step is not read from the source. A recording is refused if Python
reads a value of a tensor in the step, or if a kernel that is not C++ attends. It is then tried in the next steps: the
model runs as well, and both must give the same.
"""

from collections.abc import Iterator

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType

from vllm_opset.attention.impl import OpsetAttentionImpl
from vllm_opset.attention.metadata import OpsetMetadata
from vllm_opset.kernels.cpp._build import library
from vllm_opset.platform.cpu.recording import Recording, recorded

logger = init_logger(f"vllm.{__name__}")

# The most requests of a step that is recorded. With more of them, kernels take much longer than Python.
MOST_REQUESTS = 32
# A model's recordings keep at most so many bytes of results.
MOST_BYTES = 256 << 20
# A recording is compared with the model in so many steps.
TRIALS = 2
# A runner that used no address of its inputs again would record each step. So this many are recorded of one number of
# requests.
MOST_ADDRESSES = 4


class RecordedSteps:
    """The forward of a model that makes recorded decode steps again. replayed: how many."""

    def __init__(self, model: nn.Module, layer_names: list[str]) -> None:
        """layer_names: of all attention layers."""
        self.forward, self.layer_names = model.forward, layer_names
        self.replayed = 0
        self.forget()

    def forget(self) -> None:
        """Forget all steps, since weights were loaded again, maybe to other addresses."""
        self._recordings: dict[tuple, tuple[Recording, torch.Tensor] | None] = {}
        self._tried: dict[tuple, int] = {}
        self._bytes = 0

    def __call__(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: object = None,
        inputs_embeds: torch.Tensor | None = None,
        **others,
    ):
        """Takes what vLLM's runners give a language model."""

        def forward():
            return self.forward(
                input_ids=input_ids,
                positions=positions,
                intermediate_tensors=intermediate_tensors,
                inputs_embeds=inputs_embeds,
                **others,
            )

        if input_ids is None or inputs_embeds is not None or intermediate_tensors is not None or others:
            return forward()
        key = self._key(input_ids, positions)
        if key is None:
            return forward()
        if key not in self._recordings:
            return self._record(key, forward)
        if self._recordings[key] is None:
            return forward()
        recording, result = self._recordings[key]
        if self._tried[key] < TRIALS:
            return self._try(key, recording, result, forward)
        if not recording.replay():
            return forward()  # raises
        self.replayed += 1
        return result

    def _key(self, input_ids: torch.Tensor, positions: torch.Tensor) -> tuple | None:
        """The addresses that the calls of a decode step have; None for a step that is not recorded."""
        if not is_forward_context_available() or len(input_ids) > MOST_REQUESTS:
            return None
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            return None
        of_layers = [metadata.get(name) for name in self.layer_names]
        groups = {id(one): one for one in of_layers}.values()  # layers whose caches are in the same group share it
        if not all(_decodes(one, len(input_ids)) for one in groups):
            return None
        inputs = (input_ids, positions, *(tensor for one in groups for tensor in _inputs(one)))
        return tuple((tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in inputs)

    def _record(self, key: tuple, forward):
        """Run the model, and record its calls."""
        if sum(other[0][1] == key[0][1] for other in self._recordings) >= MOST_ADDRESSES:
            return forward()
        with recorded() as recording:
            result = forward()
        reason = self._why_not(recording, result)
        if reason is None:
            self._bytes += recording.nbytes()
            self._recordings[key], self._tried[key] = (recording, result), 0
            return result.clone()  # the next step writes it again
        logger.debug("Decode steps of %d requests are not recorded: %s", *key[0][1], reason)
        self._recordings[key] = None
        return result

    def _why_not(self, recording: Recording, result: object) -> str | None:
        if recording.reason is not None:
            return recording.reason
        if not isinstance(result, torch.Tensor):
            return "the model returns more than hidden states"
        from vllm_opset.kernels.cpp.paged_attention import run

        attended = sum(call.function is run.code for call in recording.calls)
        if attended != len(self.layer_names):
            return f"the C++ kernel attended in {attended} of {len(self.layer_names)} layers"
        if self._bytes + recording.nbytes() > MOST_BYTES:
            return f"recorded steps would take more than {MOST_BYTES >> 20} MiB"
        return None

    def _try(self, key: tuple, recording: Recording, result: torch.Tensor, forward) -> torch.Tensor:
        """Run the model, and compare the recording with it. Both write the same keys and values."""
        expected = forward()
        if recording.replay() and torch.equal(result, expected):
            self._tried[key] += 1
        else:
            logger.debug("Decode steps of %d requests are not recorded: they differ", *key[0][1])
            self._recordings[key] = None
        return expected


def _decodes(metadata: OpsetMetadata | None, num_tokens: int) -> bool:
    """Whether each request has one token in the step. False for a layer that vLLM gives no metadata."""
    if metadata is None:
        return False
    return metadata.batch.max_query_len == 1 and metadata.batch.seq_lens.shape[0] == num_tokens


def _inputs(metadata: OpsetMetadata) -> Iterator[torch.Tensor]:
    batch = metadata.batch
    yield from (batch.query_start_loc, batch.seq_lens, batch.block_table, metadata.slot_mapping)


def bind(model: nn.Module, vllm_config: VllmConfig) -> RecordedSteps | None:
    """Let a loaded model record its decode steps, unless `--enforce-eager` is given. None if it cannot."""
    config, layers = vllm_config.model_config, vllm_config.compilation_config.static_forward_context
    # vLLM's layers of experts are there as well, and have no state.
    stateful = {name: layer for name, layer in layers.items() if not hasattr(layer, "routed_experts")}
    if (
        library().code is None
        or config.enforce_eager
        or config.runner_type != "generate"
        or config.is_multimodal_model
        or getattr(config, "enable_return_routed_experts", False)  # Python notes the experts of each step
        or vllm_config.speculative_config is not None  # drafting reads more than hidden states
        or vllm_config.lora_config is not None  # the adapters of a step are not among its inputs
        or vllm_config.kv_transfer_config is not None  # the connector acts between layers
        or vllm_config.parallel_config.world_size > 1  # sums over workers are no operators of PyTorch
        or not stateful
        or not all(map(_attends_tokens, stateful.values()))
    ):
        return None
    model.forward = RecordedSteps(model, list(stateful))
    return model.forward


def _attends_tokens(layer: object) -> bool:
    """Whether a layer attends the step's own requests, and has no other state."""
    is_plain = type(layer) is Attention and layer.attn_type == AttentionType.DECODER
    return is_plain and isinstance(layer.impl, OpsetAttentionImpl)
