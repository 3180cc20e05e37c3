"""The sampler of vLLM's second model runner with opset's kernel for the draw, from the logits to one token a row.

The second model runner's sampler keeps no random state for a request. The key of a draw is made from the request's seed
and the position of the token. So a seeded request draws the same tokens in any batch.
"""

import functools
import inspect
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS, SamplingStates

from vllm_opset import ops, selection
from vllm_opset.model import filters
from vllm_opset.ops.sampling.top_k_top_p_sample import TopKTopPSampleProblem

logger = init_logger(f"vllm.{__name__}")

# The golden ratio in 64 bits. Its multiples are far apart, so the keys of two requests with small seeds never collide.
KEY_STEP = 0x9E3779B97F4A7C15 - 2**64
# The names of vLLM's parameters that say which request each row of a step belongs to.
ROWS = ("expanded_idx_mapping", "idx_mapping_np")
PROCESSED = ("processed_logits", "processed_logprobs")
# The module of the first model runner's sampler.
FIRST = "vllm.v1.sample.sampler"
# The package of the logits processors that are vLLM's own.
OF_VLLM = Sampler.__module__.rpartition(".")[0]


class OpsetSampler(Sampler):
    """opset's version of `vllm.v1.worker.gpu.sample.sampler.Sampler`, which takes over the state of vLLM's sampler.

    stock: vLLM's sampler. logits_dtype: of the model's logits; if vLLM modifies the logits first, they are fp32.
    """

    def __init__(self, stock: Sampler, logits_dtype: torch.dtype, device: torch.device) -> None:
        vars(self).update(vars(stock))
        self.sampling_states = _States(stock.sampling_states)
        vocab_size = self.sampling_states.vocab_size
        self._draw = {
            dtype: selection.select(ops.top_k_top_p_sample, TopKTopPSampleProblem(device.type, dtype, vocab_size)).run
            for dtype in {logits_dtype, torch.float32}
        }
        self._has_new_requests = True
        # Up to 0.28 there are no processors but vLLM's own.
        processors = getattr(stock, "logits_processors", ())
        self._writes_each_step = any(not type(own).__module__.startswith(OF_VLLM) for own in processors)

    def add_request(self, *args, **kwargs) -> None:
        super().add_request(*args, **kwargs)
        self._has_new_requests = True

    def apply_staged_writes(self) -> None:
        """vLLM's method, only where there is something to write: it copies the parameters of all requests.

        vLLM's own parts write for new requests alone. A user's logits processor may write in each step.
        """
        if self._has_new_requests or self._writes_each_step:
            super().apply_staged_writes()
            self._has_new_requests = False

    def warm_up(self, device: torch.device) -> None:
        """Call every variant of the kernel that a request can ask for, so that no request waits for a compilation."""
        vocab_size = self.sampling_states.vocab_size
        ones = torch.ones(2, device=device)
        for dtype, draw in self._draw.items():
            logits = torch.zeros(2, vocab_size, dtype=dtype, device=device)
            for processed in {None, "logits" if self.logprobs_mode in PROCESSED else None}:
                for given in filters.combinations(2, device):
                    draw(logits, ones.long(), ones, **given, processed=processed)

    def _sample_random(
        self,
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        pos: torch.Tensor,
        top_k: torch.Tensor | None,
        top_p: torch.Tensor | None,
        *whether_others_can,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens, and the processed logits if a request needs them; otherwise the logits."""
        of_rows = self.sampling_states.of_rows(expanded_idx_mapping, idx_mapping_np)
        processed = "logits" if self.logprobs_mode in PROCESSED and self._gives_logprobs(idx_mapping_np) else None
        tokens, kept = self._draw[logits.dtype](
            logits,
            pos
            if of_rows.all_greedy
            else self._keys(expanded_idx_mapping, of_rows.seeds, pos),  # greedy rows use no key
            of_rows.temperature,
            top_k,
            top_p,
            min_p=of_rows.min_p,
            processed=processed,
        )
        return tokens, logits if kept is None else kept

    def _keys(self, rows: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return draw_keys(seeds, positions)

    def _gives_logprobs(self, idx_mapping_np: np.ndarray) -> bool:
        return (
            self.sampling_states.max_num_logprobs(idx_mapping_np) != NO_LOGPROBS
            or self.logprob_token_ids_state.max_num_token_ids(idx_mapping_np) > 0
        )


class OpsetSamplerInOneStep(OpsetSampler):
    """For 0.26 to 0.29, whose `sample` does the work that later releases split into `sample` and `_sample_random`."""

    def sample(self, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the parameters of vLLM's `sample` by their names, because 0.28 has one more."""
        given = dict(zip(_parameters(Sampler, "sample"), args, strict=False)) | kwargs
        given.pop("return_logprobs", None)  # `_sample_random` determines it
        logits = self.apply_sampling_params(**given, skip_top_k_top_p=True)
        rows = [given[name] for name in ROWS]
        return self._sample_random(logits, *rows, given["pos"], *self.sampling_states.get_top_k_top_p(*rows))


class _OfRows(NamedTuple):
    """What the requests of a batch ask for, by row. min_p: None if no request has one."""

    temperature: torch.Tensor
    seeds: torch.Tensor
    min_p: torch.Tensor | None
    all_greedy: bool


class _States(SamplingStates):
    """The sampling parameters of all requests. The op applies temperature and min-p, so these methods do nothing.

    The parameters of the rows are gathered when requests come and go, not in each step: a gather takes a launch.
    """

    def __init__(self, stock: SamplingStates) -> None:
        vars(self).update(vars(stock))
        self._batch: bytes | None = None
        self._gathered: dict[str, tuple] = {}

    def add_request(self, *args, **kwargs) -> bool:
        self._batch = None
        return super().add_request(*args, **kwargs)

    def get_top_k_top_p(
        self, expanded_idx_mapping: torch.Tensor, idx_mapping_np: np.ndarray, *args, **kwargs
    ) -> tuple[torch.Tensor | bool | None, ...]:
        """vLLM's method. Later releases take the size of the vocabulary too, and return more."""
        rows, gather = (expanded_idx_mapping, idx_mapping_np), super().get_top_k_top_p
        return self._once("filters", *rows, lambda: gather(*rows, *args, **kwargs))

    def of_rows(self, rows: torch.Tensor, requests: np.ndarray) -> _OfRows:
        return self._once("others", rows, requests, lambda: self._of_rows(rows, requests))

    def _of_rows(self, rows: torch.Tensor, requests: np.ndarray) -> _OfRows:
        min_p = self.min_p.gpu[rows] if self.min_p.np[requests].any() else None
        all_greedy = not self.temperature.np[requests].any()
        return _OfRows(self.temperature.gpu[rows], self.seeds.gpu[rows], min_p, all_greedy)

    def _once(self, name: str, rows: torch.Tensor, requests: np.ndarray, gather: Callable[[], tuple]) -> tuple:
        """What was gathered for these requests in this order, as long as no request was added since."""
        if len(rows) != len(requests):  # a request has several rows, and vLLM says on the GPU alone which ones
            return gather()
        batch = requests.tobytes()
        if batch != self._batch:
            self._batch, self._gathered = batch, {}
        if name not in self._gathered:
            self._gathered[name] = gather()
        return self._gathered[name]

    def apply_temperature(self, *args, **kwargs) -> None:
        pass

    def apply_min_p(self, *args, **kwargs) -> None:
        pass


def draw_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The key of the draw at each position, int64. Each position of a seed has another key."""
    return torch.add(seeds, positions, alpha=KEY_STEP)


def fitting() -> type[OpsetSampler] | None:
    """The sampler that fits the parameters of this vLLM's drawing methods; None if the parameters are unknown."""
    if _parameters(Sampler, "_sample_random")[1:6] == (*ROWS, "pos", "top_k", "top_p"):
        return OpsetSampler
    *batch, _ = _parameters(Sampler, "apply_sampling_params")
    in_one_step = _parameters(Sampler, "sample") == (*batch, "return_logprobs")
    return OpsetSamplerInOneStep if in_one_step and _parameters(SamplingStates, "get_top_k_top_p") == ROWS else None


@functools.cache
def _parameters(cls: type, method: str) -> tuple[str, ...]:
    """The names of a method's parameters after `self`; none if the class has no such method."""
    found = getattr(cls, method, None)
    return tuple(inspect.signature(found).parameters)[1:] if found else ()


def install(runner) -> bool:
    """Replace the sampler of a runner whose model was loaded, and return whether the sampler's class is a known one."""
    kind = type(runner.sampler)
    if kind.__module__ == FIRST:
        from vllm_opset.model.v1 import sampler as first

        first.install(runner)
        return True
    fits = fitting()
    if kind is Sampler and fits:
        runner.sampler = fits(runner.sampler, runner.model_config.dtype, runner.device)
        return True
    if kind is Sampler:
        logger.warning_once("vllm-opset's sampler does not serve: that of this vLLM release takes other parameters")
    elif runner.sampler is not None:
        logger.info_once(f"vllm-opset's sampler does not serve: this model brings its own {kind.__name__}")
    return False
