"""The sampler for vLLM's second model runner, on a CPU: vLLM's own class around opset's draw.

vLLM's buffers need a GPU, so they are replaced. vLLM's kernels that no request here needs are replaced too.
`test_native_sampler.py` builds vLLM's whole sampler.
"""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_opset import ops, selection
from vllm_opset.ops import _samples

pytestmark = pytest.mark.window

VOCABULARY = 331
# Each request has its own place among those that vLLM reserves.
REQUESTS = {
    6: {"temperature": 2.0, "min_p": 0.5},
    1: {"temperature": 1.5, "top_k": 5},
    4: {"temperature": 0.0},
    0: {"temperature": 0.7, "top_p": 0.6},
    3: {"temperature": 1.9},
}
PLACES = 8


class Idle:
    """An object whose every method does nothing."""

    def __getattr__(self, name: str):
        return lambda *args, **kwargs: 0


@pytest.fixture
def sampler(monkeypatch):
    """`sampler(requests, mode)`: opset's sampler, in place of vLLM's in a model runner, with these requests."""
    from vllm import SamplingParams
    from vllm.v1.worker.gpu import buffer_utils
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.sample.states import SamplingStates

    from vllm_opset.model.sampler import install

    monkeypatch.setattr(buffer_utils, "UvaBufferPool", lambda *_: SimpleNamespace(copy_to_uva=_copied))
    selection.configure()

    def make(requests: dict[int, dict], mode: str = "processed_logits"):
        stock = Sampler.__new__(Sampler)
        names = ("penalties_state", "logit_bias_state", "bad_words_state", "thinking_budget_state")
        vars(stock).update({name: Idle() for name in names})
        # vLLM 0.27 alone asks these which requests it processes.
        nobody = np.zeros(PLACES, dtype=bool)
        stock.logit_bias_state.use_logit_bias = stock.penalties_state.use_penalty = nobody
        stock.bad_words_state.num_bad_words = SimpleNamespace(np=nobody)
        stock.sampling_states, stock.logits_processors = SamplingStates(PLACES, VOCABULARY), []
        stock.logprobs_mode, stock.use_flashinfer, stock.use_xpu_sampler = mode, False, False
        stock.logprob_token_ids_state = SimpleNamespace(max_num_token_ids=lambda places: 0)
        stock.needs_logits_processing = np.ones(PLACES, dtype=bool)
        for place, asked in requests.items():
            stock.sampling_states.add_request(place, SamplingParams(seed=place, logprobs=1, **asked))
        stock.sampling_states.apply_staged_writes()
        config = SimpleNamespace(dtype=torch.float32, head_dtype=torch.float32)
        without_drafts = SimpleNamespace(speculative_config=None)
        runner = SimpleNamespace(
            sampler=stock, model_config=config, device=torch.device("cpu"), vllm_config=without_drafts
        )
        assert install(runner) and runner.sampler is not stock
        return runner.sampler

    return make


def _copied(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.copy())


def sample(sampler, places: list[int], positions: list[int], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A step of the requests in these places, called as this vLLM release does: tokens, and processed logits."""
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    rows = torch.tensor(places)
    known = {
        "logits": logits.clone(),
        "expanded_idx_mapping": rows,
        "idx_mapping": rows,
        "idx_mapping_np": rows.numpy(),
        "pos": torch.tensor(positions),
        "input_ids": torch.zeros(len(places), dtype=torch.int64),
        "expanded_local_pos": torch.zeros(len(places), dtype=torch.int64),
        "seq_lens_upper_bound_np": np.array(positions) + 1,
        "return_logprobs": True,
    }
    asked = inspect.signature(Sampler.sample).parameters  # the parameters that vLLM passes
    return sampler.sample(**{name: known[name] for name in asked if name in known})[:2]


def logits(num_rows: int) -> torch.Tensor:
    return _samples.normal((num_rows, VOCABULARY), torch.float32, "cpu", _samples.generator("native"), 2.5)


@pytest.mark.parametrize("mode", ["processed_logits", "processed_logprobs"])
def test_each_request_gets_what_it_asked_for(mode, sampler):
    places = list(REQUESTS)
    tokens, kept = sample(sampler(REQUESTS, mode), places, [17] * len(places), logits(len(places)))

    def settings(name: str, off: float) -> torch.Tensor:
        return torch.tensor([REQUESTS[place].get(name, off) for place in places])

    _, expected = ops.top_k_top_p_sample(
        logits(len(places)),
        torch.zeros(len(places), dtype=torch.int64),
        settings("temperature", 1.0),
        settings("top_k", VOCABULARY).int(),
        settings("top_p", 1.0),
        settings("min_p", 0.0),
        processed="logits",
    )
    torch.testing.assert_close(kept, expected, rtol=1e-5, atol=1e-5)
    assert expected.gather(1, tokens[:, None]).isfinite().all(), "drew a token that is not kept"
    assert len({int(row.isfinite().sum()) for row in expected}) > 2, "the requests ask for much the same"


@pytest.mark.parametrize("mode", ["raw_logits", "raw_logprobs"])
def test_logits_that_nobody_asked_for_are_not_processed(mode, sampler):
    given = logits(len(REQUESTS))
    _, kept = sample(sampler(REQUESTS, mode), list(REQUESTS), [17] * len(REQUESTS), given)
    assert torch.equal(kept, given)


def test_the_processed_logits_of_a_greedy_batch_are_its_logits(sampler):
    given = logits(2)
    greedy = {0: {"temperature": 0.0}, 3: {"temperature": 0.0, "top_k": 2}}
    tokens, kept = sample(sampler(greedy), [3, 0], [5, 6], given)
    assert torch.equal(kept, given) and torch.equal(tokens, given.argmax(dim=-1))


def test_a_seeded_request_draws_by_seed_and_position_whatever_its_batch(sampler):
    random = sampler({place: {"temperature": 2.0} for place in range(PLACES)})
    row = logits(1)

    def drawn(places: list[int], positions: list[int]) -> list[int]:
        return sample(random, places, positions, row.expand(len(places), -1))[0].tolist()

    positions = list(range(40))
    of_one = [drawn([2], [position])[0] for position in positions]
    assert [drawn([5, 2, 7], [3, position, 9])[1] for position in positions] == of_one
    assert len(set(of_one)) > len(positions) // 2, "each token is drawn by the same random numbers"
    of_another = [drawn([5], [position])[0] for position in positions]
    assert sum(one == other for one, other in zip(of_one, of_another, strict=True)) < len(positions) // 2
