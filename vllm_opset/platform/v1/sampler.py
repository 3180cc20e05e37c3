"""The sampler of vLLM's first model runner, with opset's penalties, and its steps from the temperature to the token.

The other steps of `Sampler.forward` stay vLLM's: raw log-probabilities, allowed tokens, bad words, logits processors,
and gathering the log-probabilities that a request asked for.

A seeded request draws the same tokens on every device and in any batch. Each draw has its own key, made from the
request's seed and the number of its draws so far.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from vllm.config.model import LogprobsMode
from vllm.utils.torch_utils import make_tensor_with_pad
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from vllm_opset import ops, selection
from vllm_opset.model import filters
from vllm_opset.ops.contract import Problem
from vllm_opset.ops.sampling import philox
from vllm_opset.ops.sampling.top_k_top_p_sample import GREEDY_BELOW, TopKTopPSampleProblem

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

# How far a draw advances a generator's offset. vLLM's runner takes this much back for a token that is discarded.
OFFSET_PER_DRAW = 4
PROCESSED: dict[LogprobsMode, str] = {"processed_logits": "logits", "processed_logprobs": "logprobs"}
# vLLM's placeholder for tokens that are not known yet, in lists of output tokens.
PLACEHOLDER_TOKEN_ID = -1
# vLLM's number of log-probabilities for those of all tokens.
ALL = -1


class OpsetSampler(Sampler):
    """opset's version of `vllm.v1.sample.sampler.Sampler`.

    vocab_size: the width of the logits. device: the device of the logits.
    """

    def __init__(self, logprobs_mode: LogprobsMode, vocab_size: int, device: torch.device) -> None:
        super().__init__(logprobs_mode)
        # vLLM's own sampler is deleted, so that nothing uses it by mistake.
        del self.topk_topp_sampler
        sampling = TopKTopPSampleProblem(device.type, torch.float32, vocab_size)
        self._sample = selection.select(ops.top_k_top_p_sample, sampling)
        self._penalise = selection.select(ops.apply_penalties, Problem(device.type, torch.float32))
        self._num_logprobs: int | None = None  # of the batch; vLLM does not pass it to each method that needs it

    def sample(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        logprobs_mode_override: LogprobsMode | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The tokens, and the processed logits or log-probabilities if a request and the mode ask for them."""
        metadata = sampling_metadata
        self._num_logprobs = metadata.max_num_logprobs
        asked_for = metadata.max_num_logprobs is not None or metadata.logprob_token_ids
        processed = PROCESSED.get(logprobs_mode_override or self.logprobs_mode) if asked_for else None
        if metadata.all_greedy and processed is None:
            return self._sample.run(logits, None)
        if metadata.all_greedy:
            nothing = torch.zeros(len(logits), device=logits.device)
            return self._sample.run(logits, nothing.long(), nothing, processed=processed)
        logits, temperature, min_p = self._argmax_invariant_steps(logits, metadata)
        keys = draw_keys(len(logits), metadata.generators, logits.device, self.pin_memory)
        top_k = None if metadata.top_k is None else metadata.top_k.int()  # int64 in vLLM's profile run
        return self._sample.run(logits, keys, temperature, top_k, metadata.top_p, min_p=min_p, processed=processed)

    def apply_penalties(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        output_token_ids: list[list[int]],
    ) -> torch.Tensor:
        metadata = sampling_metadata
        if metadata.no_penalties:
            return logits
        vocab_size = logits.shape[1]
        outputs = make_tensor_with_pad(
            output_token_ids, pad=vocab_size, dtype=torch.int64, device="cpu", pin_memory=self.pin_memory
        ).to(logits.device, non_blocking=True)
        outputs.masked_fill_(outputs == PLACEHOLDER_TOKEN_ID, vocab_size)
        self._penalise.run(
            logits,
            metadata.prompt_token_ids,
            outputs,
            metadata.repetition_penalties,
            metadata.presence_penalties,
            metadata.frequency_penalties,
        )
        return logits

    def warm_up(self, device: torch.device) -> None:
        """Call every variant of the kernels that a request can ask for, so that no request waits for a compilation."""
        vocab_size, processed = self._sample.problem.vocab_size, {None, PROCESSED.get(self.logprobs_mode)}
        filters.draw_by_each({torch.float32: self._sample.run}, vocab_size, device, processed)
        ones = torch.ones(2, device=device)
        ids = ones.long()[:, None]
        self._penalise.run(torch.zeros(2, vocab_size, device=device), ids, ids, ones, ones, ones)

    def gather_logprobs(self, *args, **kwargs) -> LogprobsTensors:
        """vLLM's method without torch.compile: requests need not wait for it to fuse only a comparison and a sum."""
        with torch.compiler.set_stance("force_eager"):
            return super().gather_logprobs(*args, **kwargs)

    def gather_specific_token_logprobs(
        self, logprobs: torch.Tensor, logprob_token_ids: dict[int, list[int]], sampled: torch.Tensor
    ) -> LogprobsTensors | None:
        """vLLM's method without torch.compile, for the same reason, and with the likeliest tokens of all other rows.

        vLLM leaves these out, in 0.26 to 0.33. A request with logprob_token_ids then took away the likeliest tokens of
        all requests of its batch.
        """
        with torch.compiler.set_stance("force_eager"):
            given = super().gather_specific_token_logprobs(logprobs, logprob_token_ids, sampled)
        if given is None or self._num_logprobs is None:
            return given
        number = logprobs.shape[1] if self._num_logprobs == ALL else self._num_logprobs
        likeliest = self.gather_logprobs(logprobs, number, sampled)
        rows = torch.tensor([row in logprob_token_ids for row in range(len(logprobs))], pin_memory=self.pin_memory)
        return _merged(given, likeliest, rows.to(logprobs.device, non_blocking=True)[:, None])

    def _argmax_invariant_steps(
        self, logits: torch.Tensor, metadata: SamplingMetadata
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The logits, temperature and min-p to pass to the op.

        The op applies vLLM's min-p itself. Other processors must run after temperature and min-p, and before top-k. If
        there are any, temperature, min-p and processors are applied here.
        """
        processors = metadata.logitsprocs.argmax_invariant
        if all(type(processor) is MinPLogitsProcessor for processor in processors):
            tensors = [processor.min_p.squeeze(1) for processor in processors if processor.min_p_count]
            return logits, metadata.temperature, tensors[0] if tensors else None
        logits = self.apply_temperature(logits, metadata.temperature, metadata.all_random)
        for processor in processors:
            logits = processor.apply(logits)
        return logits, (metadata.temperature >= GREEDY_BELOW).float(), None


def _merged(given: LogprobsTensors, likeliest: LogprobsTensors, rows: torch.Tensor) -> LogprobsTensors:
    """The rows of `given` that `rows`, bool [num_rows, 1], names, and those of `likeliest` elsewhere.

    Both are [num_rows, 1 + their number of tokens], with the drawn token first. The narrower one is filled up as vLLM
    does it, by the token 0 with the log-probability -inf.
    """
    width = max(given.logprobs.shape[1], likeliest.logprobs.shape[1])

    def wide(tensor: torch.Tensor, fill: float) -> torch.Tensor:
        return F.pad(tensor, (0, width - tensor.shape[1]), value=fill)

    ids, values = (
        torch.where(rows, *(wide(getattr(tensors, name), fill) for tensors in (given, likeliest)))
        for name, fill in (("logprob_token_ids", 0), ("logprobs", -torch.inf))
    )
    return LogprobsTensors(ids, values, likeliest.selected_token_ranks)


class SeededGenerator(torch.Generator):
    """A CPU generator that counts its draws, as GPU generators do and vLLM's runner expects.

    If a request's prompt is only partly computed, the runner takes its draw back by the offset of its generator.
    PyTorch's CPU generators have no offset and raise, in vLLM 0.26 to 0.33.
    """

    def __new__(cls, seed: int) -> "SeededGenerator":
        return super().__new__(cls, device="cpu")

    def __init__(self, seed: int) -> None:
        self.manual_seed(seed)
        self._offset = 0

    def get_offset(self) -> int:
        return self._offset

    def set_offset(self, offset: int) -> None:
        self._offset = offset


def draw_keys(
    num_rows: int, generators: dict[int, torch.Generator], device: torch.device, pin_memory: bool = False
) -> torch.Tensor:
    """The key of each row's next draw, int64 [num_rows], from the row's own generator or from PyTorch's default one.

    pin_memory: whether to copy the keys from pinned memory, so that the copy runs asynchronously. Without it, the host
    would wait until the device has finished all queued work.
    """
    keys = torch.empty(num_rows, dtype=torch.int64, device=device).random_()
    if generators:
        drawn = [list(generators), [_next_key(generator) for generator in generators.values()]]
        rows, of_rows = torch.tensor(drawn, pin_memory=pin_memory).to(device, non_blocking=True)
        keys[rows] = of_rows
    return keys


def _next_key(generator: torch.Generator) -> int:
    offset, seed = generator.get_offset(), generator.initial_seed()
    generator.set_offset(offset + OFFSET_PER_DRAW)
    words = philox.block(offset // OFFSET_PER_DRAW, 0, 0, 0, seed & philox.MASK, seed >> 32 & philox.MASK)
    key = words[0] | words[1] << 32
    return key - 2**64 if key >> 63 else key


def install(runner: "GPUModelRunner") -> None:
    """Replace the sampler of vLLM's first model runner, which was just built."""
    model_config = runner.model_config
    runner.sampler = OpsetSampler(model_config.logprobs_mode, model_config.get_vocab_size(), runner.device)
    if hasattr(runner, "rejection_sampler"):  # for drafts; its sampler draws the token after the last draft
        runner.rejection_sampler.sampler = runner.sampler


def count_draws(runner: "GPUModelRunner") -> None:
    """Give new seeded requests generators that count their draws. On a CPU, this runs before each step."""
    generators = runner.input_batch.generators
    for index, generator in generators.items():
        if not isinstance(generator, SeededGenerator):
            request = runner.requests[runner.input_batch.req_ids[index]]
            generators[index] = request.generator = SeededGenerator(generator.initial_seed())
