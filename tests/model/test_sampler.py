"""OpsetSampler against vLLM's own Sampler, with vLLM's own metadata and logits processors."""

import pytest
import torch

from vllm_opset import selection
from vllm_opset.ops import _samples

VOCABULARY = 331
ROWS = 7
MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
CPU = torch.device("cpu")

pytestmark = pytest.mark.window


@pytest.fixture(autouse=True)
def fresh_choices():
    selection.configure()
    yield
    selection.configure()


def opset_sampler(mode: str = "raw_logprobs"):
    from vllm_opset.platform.v1.sampler import OpsetSampler

    return OpsetSampler(mode, VOCABULARY, CPU)


def logits(name: str = "logits", num_rows: int = ROWS) -> torch.Tensor:
    return _samples.normal((num_rows, VOCABULARY), torch.float32, "cpu", _samples.generator(name), 2.5)


def metadata(num_rows: int = ROWS, processors=(), **changes):
    """vLLM's metadata for a batch of random requests, with only the given extras."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    temperature = changes.get("temperature", torch.full((num_rows,), 0.8))
    plain = {
        "temperature": temperature,
        "all_greedy": bool((temperature < 1e-5).all()),
        "all_random": bool((temperature >= 1e-5).all()),
        "top_p": None,
        "top_k": None,
        "generators": {},
        "max_num_logprobs": None,
        "no_penalties": True,
        "prompt_token_ids": None,
        "frequency_penalties": torch.zeros(num_rows),
        "presence_penalties": torch.zeros(num_rows),
        "repetition_penalties": torch.ones(num_rows),
        "output_token_ids": [[] for _ in range(num_rows)],
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(processors),
    }
    if plain["all_greedy"]:
        plain["temperature"] = changes["temperature"] = None
    return SamplingMetadata(**plain | changes)


def cycle(values: list, num_rows: int = ROWS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)[torch.arange(num_rows) % len(values)]


def mixed_temperatures() -> torch.Tensor:
    return cycle([0.7, 0.0, 1.0, 1.6])


def filters() -> dict:
    return {"top_k": cycle([20, VOCABULARY, 3], dtype=torch.int32), "top_p": cycle([0.9, 1.0, 0.5, 0.97])}


def penalties() -> dict:
    rng = _samples.generator("penalties")
    prompts = torch.randint(0, VOCABULARY + 1, (ROWS, 12), generator=rng)
    # Few different tokens, so that some occur several times.
    outputs = [torch.randint(0, 6, (length,), generator=rng).tolist() for length in range(3, 3 + ROWS)]
    outputs[2][1:] = [-1, -1]  # not known yet, as with async scheduling
    return {
        "no_penalties": False,
        "prompt_token_ids": prompts,
        "output_token_ids": outputs,
        "frequency_penalties": cycle([0.3, -0.1, 0.0]),
        "presence_penalties": cycle([0.0, 0.8]),
        "repetition_penalties": cycle([1.3, 1.0, 0.7]),
    }


def from_requests(*per_request: dict) -> list:
    """vLLM's processors for min-p and logit bias, in the state that such requests put them in."""
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinPLogitsProcessor
    from vllm.v1.sample.logits_processor.interface import BatchUpdate

    config = VllmConfig()
    processors = [kind(config, CPU, False) for kind in (LogitBiasLogitsProcessor, MinPLogitsProcessor)]
    added = [(row, SamplingParams(**per_request[row % len(per_request)]), None, []) for row in range(ROWS)]
    for processor in processors:
        processor.update_state(BatchUpdate(batch_size=ROWS, removed=[], added=added, moved=[]))
    return processors


def near_the_top():
    """A user's processor that depends on the temperature having been applied."""
    from vllm.v1.sample.logits_processor import LogitsProcessor

    class NearTheTop(LogitsProcessor):
        def __init__(self, vllm_config=None, device=None, is_pin_memory=None):
            pass

        def is_argmax_invariant(self) -> bool:
            return True

        def update_state(self, batch_update) -> None:
            pass

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            return logits.masked_fill_(logits < logits.amax(dim=-1, keepdim=True) - 3.0, -torch.inf)

    return NearTheTop()


MIN_P = ({"min_p": 0.1}, {"min_p": 0.0}, {"min_p": 0.5}, {"min_p": 0.02})
CASES = {
    "greedy": lambda: metadata(temperature=torch.zeros(ROWS)),
    "random": metadata,
    "mixed": lambda: metadata(temperature=mixed_temperatures()),
    "filters": lambda: metadata(temperature=mixed_temperatures(), **filters()),
    "top-k alone": lambda: metadata(top_k=filters()["top_k"]),
    "top-p alone": lambda: metadata(top_p=filters()["top_p"]),
    "penalties": lambda: metadata(**penalties(), **filters()),
    "penalties, greedy": lambda: metadata(temperature=torch.zeros(ROWS), **penalties()),
    "min-p": lambda: metadata(temperature=mixed_temperatures(), processors=from_requests(*MIN_P), **filters()),
    "min-p off": lambda: metadata(processors=from_requests({})),
    "logit bias": lambda: metadata(processors=from_requests({"logit_bias": {3: 9.0, 5: -9.0}}, {}), **filters()),
    "a user's processor": lambda: metadata(
        temperature=mixed_temperatures(), processors=[*from_requests(*MIN_P), near_the_top()], **filters()
    ),
    "allowed tokens": lambda: metadata(
        allowed_token_ids_mask=torch.arange(VOCABULARY).expand(ROWS, -1) % 3 > 0, **filters()
    ),
    "bad words": lambda: metadata(bad_words_token_ids={0: [[1], [2]], 4: [[7]]}, top_k=filters()["top_k"]),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_are_vllms(case, mode):
    from vllm.v1.sample.sampler import Sampler

    results = []
    for sampler in (opset_sampler(mode), Sampler(mode)):
        asked = CASES[case]()
        asked.max_num_logprobs = 5
        results.append(sampler(logits(), asked))
    ours, theirs = results
    assert ours.sampled_token_ids.shape == theirs.sampled_token_ids.shape
    assert ours.sampled_token_ids.dtype == theirs.sampled_token_ids.dtype
    # Column 0 is the drawn token. Among the others, the tokens that are not kept have no defined order.
    mine, expected = ours.logprobs_tensors.logprobs[:, 1:], theirs.logprobs_tensors.logprobs[:, 1:]
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
    ids, expected_ids = ours.logprobs_tensors.logprob_token_ids, theirs.logprobs_tensors.logprob_token_ids
    assert torch.equal(ids[:, 1:][expected.isfinite()], expected_ids[:, 1:][expected.isfinite()])
    assert torch.equal(ids[:, :1], ours.sampled_token_ids)
    if case.endswith("greedy"):
        assert torch.equal(ours.sampled_token_ids, theirs.sampled_token_ids)
        assert torch.equal(ours.logprobs_tensors.selected_token_ranks, theirs.logprobs_tensors.selected_token_ranks)
    if mode.startswith("processed"):
        assert ours.logprobs_tensors.logprobs[:, 0].isfinite().all(), "drew a token that is not kept"


@pytest.mark.parametrize("mode", MODES)
def test_all_log_probabilities_are_vllms(mode):
    from vllm.v1.sample.sampler import Sampler

    full = [
        sampler(logits(), metadata(max_num_logprobs=-1, **filters())).logprobs_tensors.logprobs
        for sampler in (opset_sampler(mode), Sampler(mode))
    ]
    torch.testing.assert_close(*full, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_log_probabilities_of_given_tokens_are_vllms(mode):
    from vllm.v1.sample.sampler import Sampler

    given = metadata(logprob_token_ids={0: [3, 4], 5: [9]}, top_k=filters()["top_k"])
    columns = [
        sampler(logits(), given).logprobs_tensors.logprobs[:, 1:] for sampler in (opset_sampler(mode), Sampler(mode))
    ]
    torch.testing.assert_close(*columns, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("number", [1, 5, -1], ids=["fewer", "more", "all"])
def test_log_probabilities_of_given_tokens_leave_other_requests_theirs(number):
    """A batch of both kinds has the rows of batches of one kind."""
    given, both = {0: [3, 4], 5: [9]}, {"max_num_logprobs": number}
    mixed, specific, likeliest = (
        opset_sampler()(logits(), metadata(temperature=torch.zeros(ROWS), **asked)).logprobs_tensors
        for asked in (
            {"logprob_token_ids": given, **both},
            {"logprob_token_ids": given},
            {"max_num_logprobs": VOCABULARY if number == -1 else number},
        )
    )
    for row in range(ROWS):
        alone = specific if row in given else likeliest
        width = alone.logprobs.shape[1]
        assert torch.equal(mixed.logprobs[row, :width], alone.logprobs[row])
        assert torch.equal(mixed.logprob_token_ids[row, :width], alone.logprob_token_ids[row])
        assert mixed.logprobs[row, width:].eq(-torch.inf).all()
    assert torch.equal(mixed.selected_token_ranks, likeliest.selected_token_ranks)


@pytest.mark.parametrize(
    "asked", [{"max_num_logprobs": 5}, {"logprob_token_ids": {0: [3, 4], 5: [9]}}], ids=["likeliest", "given"]
)
def test_log_probabilities_wait_for_no_compiler(asked):
    from torch._dynamo.utils import counters
    from vllm.v1.sample.sampler import Sampler

    compiled = []
    for sampler in (opset_sampler(), Sampler("raw_logprobs")):
        torch._dynamo.reset()
        counters.clear()
        sampler(logits(), metadata(**asked))
        compiled.append(bool(counters["frames"]["total"]))
    assert compiled == [False, True]


def test_penalised_logits_are_vllms():
    from vllm.v1.sample.sampler import Sampler

    ours, theirs = (
        sampler.apply_penalties(logits(), metadata(**penalties()), penalties()["output_token_ids"])
        for sampler in (opset_sampler(), Sampler())
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert not torch.equal(ours, logits())


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits"])
def test_nothing_is_processed_that_nobody_asked_for(mode):
    assert opset_sampler(mode).sample(logits(), metadata())[1] is None


def test_the_mode_of_one_call_counts_before_the_samplers():
    """Compares with vLLM's sampler in that mode: in another mode, its own top-k and top-p ignore the mode of a call."""
    from vllm.v1.sample.sampler import Sampler

    asked = metadata(temperature=mixed_temperatures(), max_num_logprobs=5, **filters())
    _, ours = opset_sampler("raw_logprobs").sample(logits(), asked, logprobs_mode_override="processed_logits")
    _, theirs = Sampler("processed_logits").sample(logits(), asked)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert opset_sampler("processed_logits").sample(logits(), asked, logprobs_mode_override="raw_logits")[1] is None


def test_greedy_requests_take_the_largest_logit_next_to_random_ones():
    temperature = mixed_temperatures()
    output = opset_sampler()(logits(), metadata(temperature=temperature, **filters()))
    greedy = temperature < 1e-5
    assert torch.equal(output.sampled_token_ids.flatten()[greedy], logits().argmax(dim=-1).int()[greedy])


@pytest.mark.parametrize("processors", [[], [near_the_top()]], ids=["plain", "a user's processor"])
def test_the_greedy_bound_is_vllms(processors):
    """Among logits that are nearly the same, only a greedy request always takes the largest one."""
    from vllm.v1.sample.sampler import _SAMPLING_EPS

    close = (torch.arange(VOCABULARY) * 1e-8).expand(64, -1)
    for temperature, greedy in ((0.9 * _SAMPLING_EPS, True), (1.1 * _SAMPLING_EPS, False)):
        rows = torch.full((64,), temperature)
        rows[0] = 1.0  # so that the batch is not all greedy
        output = opset_sampler()(close.clone(), metadata(64, processors, temperature=rows))
        assert bool((output.sampled_token_ids[1:] == VOCABULARY - 1).all()) is greedy


def test_greedy_batches_draw_no_random_numbers():
    torch.manual_seed(3)
    opset_sampler()(logits(), metadata(temperature=torch.zeros(ROWS)))
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(1))


def test_random_requests_follow_the_default_generator():
    def tokens() -> list[int]:
        return opset_sampler()(logits(), metadata(temperature=torch.full((ROWS,), 3.0))).sampled_token_ids.tolist()

    torch.manual_seed(3)
    first, second = tokens(), tokens()
    torch.manual_seed(3)
    assert tokens() == first
    assert second != first


def draw(rows: list[int], seeds: list[int], steps: int, temperature: float = 3.0) -> list[list[int]]:
    """The tokens that the rows of one table of logits draw in a batch, by rows."""
    from vllm_opset.platform.v1.sampler import SeededGenerator

    generators = {place: SeededGenerator(seeds[row]) for place, row in enumerate(rows)}
    sampler = opset_sampler()
    columns = []
    for step in range(steps):
        batch = metadata(len(rows), temperature=torch.full((len(rows),), temperature), generators=generators)
        columns.append(sampler(logits(f"step {step}")[rows], batch).sampled_token_ids.flatten())
    return torch.stack(columns, dim=1).tolist()


def test_a_seeded_request_draws_the_same_whatever_its_batch():
    seeds = [5, -7, 2**63 - 1, 0, 5, 1, -(2**63)]
    together = draw(list(range(ROWS)), seeds, 12)
    assert draw([6, 2, 0, 5], seeds, 12) == [together[row] for row in (6, 2, 0, 5)]
    for row in range(ROWS):
        assert draw([row], seeds, 12) == [together[row]]
    assert len({tuple(tokens) for tokens in together}) == ROWS


def test_every_draw_of_every_seed_has_a_key_of_its_own():
    from vllm_opset.platform.v1.sampler import SeededGenerator, draw_keys

    seeds = (0, 1, 2, 1 << 32, 2 << 32, 1 << 32 | 1, -1)  # some with the same low bits
    generators = {row: SeededGenerator(seed) for row, seed in enumerate(seeds)}
    keys = torch.cat([draw_keys(ROWS, generators, CPU) for _ in range(5)])
    assert len(set(keys.tolist())) == 5 * ROWS


def test_an_unseeded_neighbour_changes_nothing():
    from vllm_opset.platform.v1.sampler import SeededGenerator

    def seeded_token(neighbours: torch.Tensor) -> int:
        torch.manual_seed(int(neighbours.sum()))
        batch = metadata(generators={3: SeededGenerator(11)}, temperature=torch.full((ROWS,), 3.0))
        rows = torch.where((torch.arange(ROWS) == 3).unsqueeze(1), logits(), neighbours)
        return opset_sampler()(rows, batch).sampled_token_ids[3].item()

    assert len({seeded_token(torch.full((ROWS, VOCABULARY), value)) for value in (0.0, 1.0, 2.0)}) == 1


def test_a_draw_that_vllm_takes_back_is_drawn_again():
    """vLLM's runner takes back the draw of a request whose prompt is only partly computed."""
    from vllm_opset.platform.v1.sampler import SeededGenerator, draw_keys

    generator = SeededGenerator(11)
    first = draw_keys(1, {0: generator}, CPU)
    generator.set_offset(generator.get_offset() - 4)
    again, then = draw_keys(1, {0: generator}, CPU), draw_keys(1, {0: generator}, CPU)
    assert torch.equal(first, again)
    assert not torch.equal(again, then)


def test_kernels_are_chosen_when_the_sampler_is_built(monkeypatch):
    monkeypatch.setenv("OPSET_KERNELS", "top_k_top_p_sample=reference,apply_penalties=reference")
    selection.configure()
    by_reference = opset_sampler()
    monkeypatch.delenv("OPSET_KERNELS")
    selection.configure()
    by_kernel = opset_sampler()
    tokens = []
    for sampler, name in ((by_reference, "reference"), (by_kernel, "cpu")):
        assert {sampler._sample.kernel.name, sampler._penalise.kernel.name} == {name}
        torch.manual_seed(1)
        tokens.append(sampler(logits(), metadata(**penalties(), **filters())).sampled_token_ids)
    assert torch.equal(*tokens)


def test_the_kernel_gets_its_dtype_of_top_k_also_in_vllms_profile_run(monkeypatch):
    """There, vLLM's top_k is int64. A kernel that is compiled for it would be another one than requests need."""
    sampler, found = opset_sampler(), []
    draw = sampler._sample.run

    def seen(logits, keys, temperature, top_k, *args, **kwargs):
        found.append(top_k.dtype)
        return draw(logits, keys, temperature, top_k, *args, **kwargs)

    monkeypatch.setattr(sampler._sample, "run", seen)
    for dtype in (torch.int64, torch.int32):
        sampler(logits(), metadata(top_k=filters()["top_k"].to(dtype)))
    assert found == [torch.int32, torch.int32]


def test_vllms_own_step_is_gone():
    assert not hasattr(opset_sampler(), "topk_topp_sampler")
