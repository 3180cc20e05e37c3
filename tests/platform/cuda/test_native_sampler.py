"""The sampler of vLLM's second model runner with opset's draw, on a CPU. It leaves out vLLM's own Triton kernels, which
these requests do not need.
"""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_opset import ops, selection

pytestmark = pytest.mark.window

VOCABULARY, ROOM = 331, 16
CPU = torch.device("cpu")


def shared_memory(buffer: type) -> type:
    """Replaces vLLM's memory that the GPU can access as well. On a CPU, plain memory is enough."""

    class SharedMemory(buffer):
        def __init__(self, size, dtype: torch.dtype) -> None:
            self.cpu = self._uva = torch.zeros(size, dtype=dtype)
            self.np = self.cpu.numpy()
            if not hasattr(buffer, "uva"):  # in early releases it is no method
                self.uva = self.cpu

    return SharedMemory


def build(cls: type, **known):
    """Builds an object of a class whose constructor takes different arguments in different releases."""
    return cls(**{name: known[name] for name in inspect.signature(cls).parameters if name in known})


@pytest.fixture
def stock(monkeypatch):
    """The sampler that vLLM builds. counted: the sizes of the batches whose tokens vLLM counts on the GPU."""
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu import buffer_utils
    from vllm.v1.worker.gpu.sample import sampler
    from vllm.v1.worker.gpu.states import RequestState

    monkeypatch.setattr(buffer_utils, "UvaBuffer", shared_memory(buffer_utils.UvaBuffer))
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: True)
    counted, name = [], "get_num_sampled_and_rejected"
    monkeypatch.setattr(
        sampler, name, lambda sampled, *_: counted.append(len(sampled)) or (sampled, torch.zeros_like(sampled))
    )
    known = {"max_num_reqs": ROOM, "vocab_size": VOCABULARY, "device": CPU, "vllm_config": VllmConfig()}
    states = build(RequestState, **known, max_model_len=64, max_num_batched_tokens=64, num_speculative_steps=0)
    made = build(sampler.Sampler, **known, req_states=states)
    made.counted = counted
    return made


@pytest.fixture
def runner(stock):
    """A model runner with opset's sampler."""
    from vllm_opset.model.sampler import install

    selection.configure()
    config = SimpleNamespace(dtype=torch.float32, head_dtype=torch.float16)
    runner = SimpleNamespace(sampler=stock, model_config=config, device=CPU, vllm_config=WITHOUT_DRAFTS)
    assert install(runner)
    yield runner
    selection.configure()


WITHOUT_DRAFTS = SimpleNamespace(speculative_config=None)
ASKED = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 2.0, "seed": 5, "min_p": 0.2},
    {"temperature": 2.0, "seed": -7, "top_k": 20},
    {"temperature": 2.0, "seed": 1, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 2.0, "seed": 1, "top_k": 50, "top_p": 0.5},
]


def logits_of(slots: list[int]) -> torch.Tensor:
    table = torch.randn(ROOM, VOCABULARY, generator=torch.Generator().manual_seed(3))
    return table[slots]


def draw(sampler, slots: list[int], position: int, logits: torch.Tensor | None = None) -> torch.Tensor:
    """The tokens of the requests in these slots, drawn through all of vLLM's code around the draw."""
    return output(sampler, slots, position, logits).sampled_token_ids.flatten()


def output(sampler, slots: list[int], position: int, logits: torch.Tensor | None = None, **known: object):
    """The same as vLLM's whole output. known: further attributes of the batch."""
    rows, count = torch.tensor(slots, dtype=torch.int32), len(slots)
    batch = SimpleNamespace(
        num_reqs=count,
        idx_mapping=rows,
        idx_mapping_np=np.array(slots, dtype=np.int32),
        expanded_idx_mapping=rows,
        expanded_local_pos=torch.zeros(count, dtype=torch.int32),
        cu_num_logits=torch.arange(count + 1, dtype=torch.int32),
        cu_num_logits_np=np.arange(count + 1, dtype=np.int32),
        positions=torch.full((count,), position),
        input_ids=torch.zeros(count, dtype=torch.int32),
        logits_indices=torch.arange(count),
        seq_lens=torch.full((count,), position + 1, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.full((count,), position + 1, dtype=torch.int32),
        **known,
    )
    return sampler(logits_of(slots) if logits is None else logits, batch)


def add_requests(sampler) -> None:
    for slot, asked in enumerate(ASKED):
        add_request(sampler, slot, asked)
    sampler.apply_staged_writes()


def _keys(seed: int, position: int) -> torch.Tensor:
    from vllm_opset.model.sampler import draw_keys

    return draw_keys(torch.tensor([seed]), torch.tensor([position]))


def add_request(sampler, slot: int, asked: dict) -> None:
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    known = {"req_idx": slot, "prompt_len": 3, "sampling_params": SamplingParams(**asked)}
    names = inspect.signature(Sampler.add_request).parameters
    sampler.add_request(**{name: known[name] for name in names if name in known})


def by_the_op(slots: list[int], position: int) -> list[int]:
    """The tokens that the op draws for requests of ASKED."""
    from vllm_opset.model.sampler import draw_keys

    asked = [ASKED[slot] for slot in slots]
    tokens, _ = ops.top_k_top_p_sample.reference(
        logits_of(slots),
        draw_keys(torch.tensor([row.get("seed", 0) for row in asked]), torch.full((len(slots),), position)),
        torch.tensor([float(row["temperature"]) for row in asked]),
        torch.tensor([row.get("top_k", VOCABULARY) for row in asked], dtype=torch.int32),
        torch.tensor([row.get("top_p", 1.0) for row in asked]),
        min_p=torch.tensor([row.get("min_p", 0.0) for row in asked]),
    )
    return tokens.tolist()


def test_vllms_second_sampler_draws_by_the_op(runner):
    add_requests(runner.sampler)
    for position in (7, 8):
        assert draw(runner.sampler, [4, 0, 3, 1, 5, 2], position).tolist() == by_the_op([4, 0, 3, 1, 5, 2], position)


def test_logits_may_have_the_dtype_of_the_head(runner):
    """Users set it by --hf-overrides, and vLLM's profile run draws from such logits."""
    slots = [0, 1]
    add_requests(runner.sampler)
    logits = logits_of(slots).half()
    tokens, by_dtype = draw(runner.sampler, slots, 9, logits).tolist(), runner.sampler._draw
    assert tokens == draw(runner.sampler, slots, 9, logits.float()).tolist() and torch.float16 in by_dtype


def test_requests_come_and_go(runner):
    """Some of these batches are all greedy, and some have no filter."""
    add_requests(runner.sampler)
    batches = [[0], [0, 1], [1], [0], [3, 0, 1], [0, 3], [4, 3], [0], [1, 2], [2, 1], [5, 1]]
    for position, slots in enumerate(batches, 3):
        assert draw(runner.sampler, slots, position).tolist() == by_the_op(slots, position), slots


def test_a_greedy_batch_takes_the_first_of_equal_logits_and_gathers_nothing(runner, monkeypatch):
    for slot in range(3):
        add_request(runner.sampler, slot, {"temperature": 0, "top_k": 5})
    runner.sampler.apply_staged_writes()
    monkeypatch.setattr(runner.sampler.sampling_states, "_of_rows", lambda *_: pytest.fail("gathers parameters"))
    logits = torch.zeros(3, VOCABULARY)
    logits[0, [9, 40, 330]], logits[1, [330]], logits[2] = 1.0, 2.0, -torch.inf
    logits[2, [77, 78]] = -5.0
    assert draw(runner.sampler, [0, 2, 1], 9, logits).tolist() == [9, 330, 77]


@pytest.fixture
def counted(runner, monkeypatch) -> list[int]:
    """The sizes of the batches whose tokens vLLM counts on the GPU. Its other kernels are replaced."""
    from vllm.v1.worker.gpu.sample import sampler

    if not hasattr(runner.sampler, "needs_logits_processing"):
        pytest.skip(
            "vLLM up to 0.27 does not note which requests modify logits: ends when 0.28 is the oldest supported release"
        )
    monkeypatch.setattr(sampler, "compute_topk_scores", lambda *args, **kwargs: "scores")
    monkeypatch.setattr(type(runner.sampler), "apply_sampling_params", lambda self, logits, **kwargs: logits)
    return runner.sampler.counted


def test_a_decoded_greedy_batch_is_not_counted_on_the_gpu(runner, counted):
    for slot in range(3):
        add_request(runner.sampler, slot, {"temperature": 0, "top_k": 5})
    for slots in ([0, 2, 1], [0, 2, 1], [1]):
        made = output(runner.sampler, slots, 9, has_prefill=False)
        assert made.sampled_token_ids.tolist() == logits_of(slots).argmax(dim=-1, keepdim=True).tolist()
        assert made.num_sampled.tolist() == [1] * len(slots) and made.num_rejected.tolist() == [0] * len(slots)
    assert not counted and made.num_sampled.dtype == made.num_rejected.dtype == torch.int32


@pytest.mark.parametrize("more", [{"presence_penalty": 0.5}, {"logprobs": 2}, {"logit_bias": {3: 1.0}}, ASKED[1]])
def test_what_a_greedy_batch_asks_for_beside_tokens_is_vllms(more, runner, counted):
    for slot, asked in enumerate(({"temperature": 0}, {"temperature": 0} | more)):
        add_request(runner.sampler, slot, asked)
    made = output(runner.sampler, [0, 1], 9, has_prefill=False)
    assert counted == [2] and (made.logprobs_tensors == "scores") is ("logprobs" in more)
    output(runner.sampler, [0], 10, has_prefill=False)
    add_request(runner.sampler, 0, {"temperature": 0} | more)
    output(runner.sampler, [0], 11, has_prefill=False)
    assert counted == [2, 1]


def test_prompts_and_rows_of_drafts_are_counted_on_the_gpu(runner, counted):
    add_request(runner.sampler, 0, {"temperature": 0})
    for logits, known in ((None, {"has_prefill": True}), (None, {}), (logits_of([0, 0]), {"has_prefill": False})):
        output(runner.sampler, [0], 9, logits, **known)
    assert counted == [1, 1, 1]


@pytest.mark.parametrize("more", ["compute_nans", "trace_replay_state", "return_sampling_mask"])
def test_a_sampler_that_does_more_is_vllms(more, stock, runner):
    add_request(stock, 0, {"temperature": 0})
    setattr(stock, more, 4)
    assert not type(runner.sampler)(stock, (), CPU)._is_plain_greedy(np.array([0]))


def test_logits_are_copied_for_logits_processors_alone(stock):
    """vLLM copies the logits of every batch with such a request to fp32. Up to 0.30 it does so for filters, too."""
    from vllm.v1.worker.gpu.sample.states import SamplingStates

    from vllm_opset.model.sampler import OpsetSampler

    if inspect.signature(SamplingStates.add_request).return_annotation is not bool:
        pytest.skip("vLLM up to 0.30 does not ask the sampler's states: ends when 0.31 is the oldest supported release")
    sampler = OpsetSampler(stock, (torch.float32,), CPU)
    others = [{"temperature": 0.5, "top_k": 3, "logit_bias": {3: 1.0}}, {"temperature": 0, "presence_penalty": 0.5}]
    for slot, asked in enumerate([*ASKED, *others]):
        add_request(sampler, slot, asked)
    needs = stock.needs_logits_processing[: len(ASKED) + len(others)].tolist()
    assert needs == [False] * len(ASKED) + [True, True]


def test_a_seeded_request_draws_the_same_whatever_its_batch(runner):
    add_requests(runner.sampler)
    together = draw(runner.sampler, list(range(len(ASKED))), 9)
    assert [draw(runner.sampler, [slot], 9).item() for slot in range(len(ASKED))] == together.tolist()


def test_a_request_in_the_place_of_another_draws_by_its_own_parameters(runner):
    add_requests(runner.sampler)
    before = draw(runner.sampler, [1, 2], 9)
    add_request(runner.sampler, 1, ASKED[4])
    runner.sampler.apply_staged_writes()
    after = draw(runner.sampler, [1, 2], 9)
    add_requests(runner.sampler)
    logits = logits_of([1])
    alone, _ = runner.sampler._draw[torch.float32](
        logits, _keys(1, 9), torch.tensor([2.0]), None, torch.tensor([0.9]), min_p=torch.tensor([0.02])
    )
    assert after.tolist() == [alone.item(), before[1].item()]
    assert draw(runner.sampler, [2, 1], 9).tolist() == before.flip(0).tolist()


def test_parameters_are_gathered_and_written_for_new_requests_alone(runner, monkeypatch):
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    written, gathered, states = [], [], runner.sampler.sampling_states
    write, gather = Sampler.apply_staged_writes, states._of_rows
    monkeypatch.setattr(Sampler, "apply_staged_writes", lambda self: written.append(0) or write(self))
    monkeypatch.setattr(
        states, "_of_rows", lambda rows, requests: gathered.append(requests.tolist()) or gather(rows, requests)
    )
    add_requests(runner.sampler)
    for slots in ([1, 2], [1, 2], [1], [1]):
        runner.sampler.apply_staged_writes()
        draw(runner.sampler, slots, 9)
    assert len(written) == 1 and gathered == [[1, 2], [1]]
    add_requests(runner.sampler)
    draw(runner.sampler, [1], 9)
    assert len(written) == 2 and gathered == [[1, 2], [1], [1]]


def test_a_sampler_that_takes_other_parameters_is_left_to_vllm(stock, monkeypatch):
    from vllm_opset.model import sampler

    known = {"apply_sampling_params": ("logits", "pos", "skip"), "sample": ("logits", "pos", "return_logprobs")}
    monkeypatch.setattr(sampler, "_parameters", lambda cls, method: known.get(method, ("something_new",)))
    runner = SimpleNamespace(sampler=stock, vllm_config=WITHOUT_DRAFTS)
    assert not sampler.install(runner) and runner.sampler is stock


def test_vllms_sampler_stays_beside_drafts(stock):
    """It also verifies drafts, so a token that is drawn in a step without drafts is drawn alike."""
    from vllm_opset.model import sampler

    runner = SimpleNamespace(sampler=stock, vllm_config=SimpleNamespace(speculative_config=object()))
    assert not sampler.install(runner) and runner.sampler is stock


def test_keys_of_draws_differ():
    """Uses all positions of many requests with small seeds, like those of users."""
    from vllm_opset.model.sampler import draw_keys

    seeds, positions = torch.arange(512), torch.arange(4096)
    keys = draw_keys(seeds[:, None], positions[None, :])
    assert keys.dtype == torch.int64 and keys.shape == (512, 4096) and len(keys.unique()) == keys.numel()
