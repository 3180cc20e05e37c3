"""The sampler of vLLM's second model runner with opset's kernel for the draw, from the logits to one token a row.

The second model runner's sampler keeps no random state for a request. The key of a draw is made from the request's seed
and the position of the token. So a seeded request draws the same tokens in any batch.
"""

import functools
import inspect
from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np
import torch
from vllm.config import ModelConfig
from vllm.logger import init_logger
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS, SamplingStates

from vllm_opset import ops, selection
from vllm_opset.model import filters
from vllm_opset.ops.sampling.top_k_top_p_sample import TopKTopPSampleProblem

logger = init_logger(f"vllm.{__name__}")

# The golden ratio in 64 bits. Its multiples are far apart, so the keys of two requests with small seeds never collide.
KEY_STEP = 0x9E3779B97F4A7C15 - 2**64
# The parameters of vLLM's `sample` that `_sampled` takes beside the logits: the request of each row on the device, the
# requests of the batch on the host, and the position of each row.
USED = ("expanded_idx_mapping", "idx_mapping_np", "pos")
# Attributes of vLLM's sampler by which it does more than to draw tokens.
MORE_THAN_TOKENS = ("compute_nans", "trace_replay_state", "return_sampling_mask")
PROCESSED = ("processed_logits", "processed_logprobs")
# The package of the logits processors that are vLLM's own.
OF_VLLM = Sampler.__module__.rpartition(".")[0]


class OpsetSampler(Sampler):
    """opset's version of `vllm.v1.worker.gpu.sample.sampler.Sampler`, which takes over the state of vLLM's sampler.

    stock: vLLM's sampler. dtypes: that logits may have.
    """

    def __init__(self, stock: Sampler, dtypes: Collection[torch.dtype], device: torch.device) -> None:
        vars(self).update(vars(stock))
        self.sampling_states = _States(stock.sampling_states)
        vocab_size = self.sampling_states.vocab_size
        self._draw = {
            dtype: selection.select(ops.top_k_top_p_sample, TopKTopPSampleProblem(device.type, dtype, vocab_size)).run
            for dtype in dtypes
        }
        self._has_new_requests = True
        self._batch: bytes | None = None  # the requests that `_batch_is_plain` tells of
        self._batch_is_plain = False
        # Up to 0.27 vLLM does not note which requests modify logits.
        self._may_be_plain = hasattr(stock, "needs_logits_processing")
        self._may_be_plain &= not any(getattr(stock, name, None) for name in MORE_THAN_TOKENS)
        places = len(self.sampling_states.temperature.np)
        self._one_each = torch.ones(places, dtype=torch.int32, device=device)
        self._no_rejected = torch.zeros_like(self._one_each)
        # Up to 0.28 there are no processors but vLLM's own.
        processors = getattr(stock, "logits_processors", ())
        self._writes_each_step = any(not type(own).__module__.startswith(OF_VLLM) for own in processors)

    def add_request(self, *args, **kwargs) -> None:
        super().add_request(*args, **kwargs)
        self._has_new_requests, self._batch = True, None

    def __call__(self, logits: torch.Tensor, input_batch) -> SamplerOutput:
        """vLLM's method. A batch of greedy decode requests takes one launch instead of six.

        vLLM gathers positions and tokens, and counts on the GPU which requests get a token. Here each one gets one.
        """
        requests = input_batch.idx_mapping_np
        is_decode = not getattr(input_batch, "has_prefill", True) and len(logits) == len(requests)
        if not (is_decode and self._is_plain_greedy(requests)):
            return super().__call__(logits, input_batch)
        tokens, _ = self._sampled(logits, input_batch.idx_mapping, requests, input_batch.positions)
        one_each, no_rejected = self._one_each[: len(requests)], self._no_rejected[: len(requests)]
        return SamplerOutput(tokens.view(-1, 1), None, None, num_sampled=one_each, num_rejected=no_rejected)

    def _is_plain_greedy(self, requests: np.ndarray) -> bool:
        """Whether each request wants the token of the largest logit, as the model gives them, and nothing else.

        The answer is cached until the requests or their order change.
        """
        batch = requests.tobytes()
        if batch != self._batch:
            self._batch = batch
            self._batch_is_plain = (
                self._may_be_plain
                and self.sampling_states.all_greedy(requests)
                and not self.needs_logits_processing[requests].any()
                and not self._gives_logprobs(requests)
            )
        return self._batch_is_plain

    def apply_staged_writes(self) -> None:
        """vLLM's method, only where there is something to write: it copies the parameters of all requests.

        vLLM's own parts write for new requests alone. A user's logits processor may write in each step.
        """
        if self._has_new_requests or self._writes_each_step:
            super().apply_staged_writes()
            self._has_new_requests = False

    def warm_up(self, device: torch.device) -> None:
        """Call every variant of the kernel that a request can ask for, so that no request waits for a compilation."""
        processed = {None, "logits" if self.logprobs_mode in PROCESSED else None}
        filters.draw_by_each(self._draw, self.sampling_states.vocab_size, device, processed)

    def sample(self, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens, and the processed logits if a request needs them; otherwise the logits.

        It takes the parameters of vLLM's `sample` by their names, because releases have different ones.
        """
        given = dict(zip(_parameters(Sampler, "sample"), args, strict=False)) | kwargs
        given.pop("return_logprobs", None)  # `_sampled` asks the requests
        logits = self.apply_sampling_params(**given, skip_top_k_top_p=True)
        return self._sampled(logits, *(given[name] for name in USED))

    def _sampled(
        self, logits: torch.Tensor, rows: torch.Tensor, requests: np.ndarray, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The results of `sample` for logits [num_rows, vocab_size] that are ready for the draw.

        rows, positions: int [num_rows], the request of each row and the position of its token. requests: int
        [num_reqs], those of the batch.
        """
        draw, states = self._draw[logits.dtype], self.sampling_states
        if states.all_greedy(requests):  # vLLM gives such requests no filters, so the processed logits are the logits
            return draw(logits, None)[0], logits
        processed = "logits" if self.logprobs_mode in PROCESSED and self._gives_logprobs(requests) else None
        seeds, settings = states.of_rows(rows, requests)
        tokens, kept = draw(logits, self._keys(rows, seeds, positions), **settings, processed=processed)
        return tokens, logits if kept is None else kept

    def _keys(self, rows: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return draw_keys(seeds, positions)

    def _gives_logprobs(self, idx_mapping_np: np.ndarray) -> bool:
        return (
            self.sampling_states.max_num_logprobs(idx_mapping_np) != NO_LOGPROBS
            or self.logprob_token_ids_state.max_num_token_ids(idx_mapping_np) > 0
        )


class Fp32Sampler(OpsetSampler):
    """Draws from logits of another dtype in fp32, as the sampler for the first model runner does."""

    def __init__(self, stock: Sampler, device: torch.device) -> None:
        super().__init__(stock, (torch.float32,), device)

    def _sampled(self, logits: torch.Tensor, *args) -> tuple[torch.Tensor, torch.Tensor]:
        return super()._sampled(logits.float(), *args)


class _OfRows(NamedTuple):
    """The parameters of a batch's requests, one value for each row. settings: arguments of the op."""

    seeds: torch.Tensor
    settings: dict[str, torch.Tensor | None]


class _States(SamplingStates):
    """The sampling parameters of all requests. The op applies temperature and min-p, so these methods do nothing.

    The parameters of the rows are gathered when requests come and go, not in each step: a gather takes a launch.
    """

    def __init__(self, stock: SamplingStates) -> None:
        vars(self).update(vars(stock))
        self._batch: bytes | None = None
        self._gathered: _OfRows | None = None

    def add_request(self, *args, **kwargs) -> bool:
        """Whether the logits must be modified before the draw, for which vLLM copies them to fp32: the op does it."""
        self._batch = None
        super().add_request(*args, **kwargs)
        return False

    def all_greedy(self, requests: np.ndarray) -> bool:
        return not self.temperature.np[requests].any()

    def of_rows(self, rows: torch.Tensor, requests: np.ndarray) -> _OfRows:
        """What was gathered for these requests in this order, as long as no request was added since."""
        batch = requests.tobytes()
        # If a request has several rows, vLLM says on the GPU alone which ones.
        if batch != self._batch or len(rows) != len(requests):
            self._batch, self._gathered = batch, self._of_rows(rows, requests)
        return self._gathered

    def _of_rows(self, rows: torch.Tensor, requests: np.ndarray) -> _OfRows:
        def unless(parameter: UvaBackedTensor, off: float) -> torch.Tensor | None:
            """The parameter, or None if it is off in all requests."""
            return None if (parameter.np[requests] == off).all() else parameter.gpu.index_select(0, rows)

        settings = {
            "temperature": self.temperature.gpu.index_select(0, rows),
            "top_k": unless(self.top_k, self.vocab_size),
            "top_p": unless(self.top_p, 1.0),
            "min_p": unless(self.min_p, 0.0),
        }
        return _OfRows(self.seeds.gpu.index_select(0, rows), settings)

    def apply_temperature(self, *args, **kwargs) -> None:
        pass

    def apply_min_p(self, *args, **kwargs) -> None:
        pass


def draw_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The key of the draw at each position, int64. Each position of a seed has another key."""
    return torch.add(seeds, positions, alpha=KEY_STEP)


def fits() -> bool:
    """Whether the parameters of this vLLM's drawing methods are known."""
    batch = _parameters(Sampler, "apply_sampling_params")[:-1]
    return _parameters(Sampler, "sample") == (*batch, "return_logprobs") and {*USED} <= {*batch}


@functools.cache
def _parameters(cls: type, method: str) -> tuple[str, ...]:
    """The names of a method's parameters after `self`; none if the class has no such method."""
    found = getattr(cls, method, None)
    return tuple(inspect.signature(found).parameters)[1:] if found else ()


def logits_dtypes(config: ModelConfig) -> set[torch.dtype]:
    """The dtypes that logits may have. Users may set one for the LM head, and some models do not ask for it.

    If vLLM modifies the logits before the draw, they are fp32.
    """
    return {config.dtype, config.head_dtype, torch.float32}


def install(runner, make: Callable[[Sampler], "OpsetSampler"] | None = None) -> bool:
    """Replace the sampler of vLLM's second runner, whose model was loaded. Returns whether it was replaced.

    vLLM verifies drafts with draws of its own, for all requests of a batch if one has drafts. So with drafts its own
    sampler stays: what a seeded request draws then depends on its own drafts alone.

    make: makes the sampler from vLLM's own; by default an OpsetSampler.
    """
    if runner.vllm_config.speculative_config is not None:
        logger.info_once("vllm-opset's sampler does not serve: vLLM verifies drafts with draws of its own sampler")
        return False
    kind = type(runner.sampler)
    if kind is Sampler and fits():
        make = make or (lambda stock: OpsetSampler(stock, logits_dtypes(runner.model_config), runner.device))
        runner.sampler = make(runner.sampler)
        return True
    if kind is Sampler:
        logger.warning_once("vllm-opset's sampler does not serve: that of this vLLM release takes other parameters")
    elif runner.sampler is not None:
        logger.info_once(f"vllm-opset's sampler does not serve: this model brings its own {kind.__name__}")
    return False
