"""top_k_top_p_sample: the filters against vLLM's own, the rules for ties by hand, the draw from its definition.

tests/test_parity.py checks for all ops that kernels equal the reference and have the properties of the contract.
"""

import math

import pytest
import torch

from vllm_opset import ops, parity
from vllm_opset.kernel import Kernel, kernels_of
from vllm_opset.ops import _samples
from vllm_opset.ops.sampling import philox
from vllm_opset.ops.sampling.top_k_top_p_sample import keep_min_p, keep_top_k, keep_top_p, relative_weights

OP = ops.top_k_top_p_sample
KERNELS = {kernel.name: kernel.run for kernel in kernels_of(OP.name).values() if kernel.runs_on("cpu")}
INFINITY = math.inf


@pytest.fixture(params=KERNELS)
def run(request):
    return KERNELS[request.param]


def kept(run, logits, **settings) -> torch.Tensor:
    """The tokens that survive the filters."""
    return run(logits, torch.zeros(len(logits), dtype=torch.int64), processed="logits", **settings)[1] > -INFINITY


def by_vllm(logits, top_k=None, top_p=None) -> torch.Tensor:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    return apply_top_k_top_p_pytorch(logits.clone(), top_k, top_p)


def settings(num_rows: int, vocab_size: int) -> dict[str, torch.Tensor]:
    rows = torch.arange(num_rows)
    return {
        "top_k": torch.tensor([vocab_size, 1, 2, 17, 50, 3], dtype=torch.int32).clamp(max=vocab_size)[rows % 6],
        "top_p": torch.tensor([0.9, 1.0, 0.3, 0.999, 0.05, 0.7, 0.5])[rows % 7],
    }


@pytest.mark.parametrize("vocab_size", [60, 331, 5003])
@pytest.mark.parametrize("which", [("top_k",), ("top_p",), ("top_k", "top_p")])
def test_keeps_what_vllm_keeps(run, vocab_size, which):
    logits = _samples.normal((42, vocab_size), torch.float32, "cpu", _samples.generator(f"{vocab_size}"), 2.5)
    chosen = {name: values for name, values in settings(*logits.shape).items() if name in which}
    assert torch.equal(kept(run, logits, **chosen), by_vllm(logits, **chosen) > -INFINITY)


def test_keeps_what_vllms_min_p_keeps(run):
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
    from vllm.v1.sample.logits_processor.interface import BatchUpdate

    logits = _samples.normal((8, 331), torch.float32, "cpu", _samples.generator("min-p"), 2.5)
    min_p = [0.0, 0.01, 0.2, 1.0, 0.5, 0.1, 0.03, 0.001]
    theirs = MinPLogitsProcessor(VllmConfig(), torch.device("cpu"), False)
    added = [(row, SamplingParams(min_p=value), None, []) for row, value in enumerate(min_p)]
    theirs.update_state(BatchUpdate(batch_size=8, removed=[], added=added, moved=[]))
    assert torch.equal(kept(run, logits, min_p=torch.tensor(min_p)), theirs.apply(logits.clone()) > -INFINITY)


def test_with_ties_keeps_as_many_as_vllm_and_the_same_values(run):
    """Among equal logits, vLLM's unstable sort may keep other tokens, but neither more nor fewer."""
    logits = torch.randint(-8, 9, (70, 331), generator=_samples.generator("ties")).float() / 4
    chosen = settings(*logits.shape)
    ours, theirs = kept(run, logits, **chosen), by_vllm(logits, **chosen) > -INFINITY
    values = [torch.where(keep, logits, -INFINITY).sort(dim=-1).values for keep in (ours, theirs)]
    assert torch.equal(*values)


@pytest.mark.parametrize(
    ("logits", "chosen", "expected"),
    [
        ([1.0, 2.0, 2.0, 2.0, 0.0], {"top_k": 1}, [1, 2, 3]),
        ([1.0, 2.0, 2.0, 2.0, 0.0], {"top_k": 2}, [1, 2, 3]),
        ([1.0, 2.0, 2.0, 2.0, 0.0], {"top_k": 4}, [0, 1, 2, 3]),
        ([0.0, 0.0, 0.0, 0.0], {"top_p": 0.6}, [0, 1, 2]),
        ([0.0, 0.0, 0.0, 0.0], {"top_p": 1e-6}, [0]),
        ([0.0, 0.0, 0.0, 0.0], {"top_p": 1e-12}, [0]),
        ([0.0, 0.0, 0.0, 0.0], {"top_p": 1.0}, [0, 1, 2, 3]),
        ([-9.0, 0.0, 1.0, 0.0, 1.0, 0.0], {"top_p": 0.7}, [1, 2, 4]),
        # Top-p applies to the tokens that top-k kept: all of the four equal tokens.
        ([0.0, 3.0, 3.0, 0.0, 3.0, 3.0], {"top_k": 1, "top_p": 0.7}, [1, 2, 4]),
        ([0.0, -INFINITY, 0.0, 1.0], {"top_k": 4}, [0, 2, 3]),
        ([0.0, -INFINITY, 0.0, 1.0], {"top_k": 3, "top_p": 0.99}, [0, 2, 3]),
        ([0.0, 1.0, 1.0], {"min_p": 1.0}, [1, 2]),
        ([0.0, 1.0, 1.0], {"min_p": 0.3}, [0, 1, 2]),
    ],
)
def test_ties_by_hand(run, logits, chosen, expected):
    tensors = {name: torch.tensor([value]) for name, value in chosen.items()}
    assert kept(run, torch.tensor([logits]), **tensors)[0].nonzero().flatten().tolist() == expected


def test_the_draw_follows_its_definition(run):
    """Computes every step again, in Python's own numbers."""
    rng = _samples.generator("definition")
    logits = _samples.normal((30, 53), torch.float32, "cpu", rng, 2.0)
    keys = torch.empty(30, dtype=torch.int64).random_(-(2**63), None, generator=rng)
    tokens, nothing = run(logits, keys, torch.full((30,), 0.7))
    assert nothing is None
    for row, key in enumerate(keys.tolist()):
        scores = []
        for token in range(53):
            lanes = philox.block(token // 4, 0, 0, 0, key & philox.MASK, key >> 32 & philox.MASK)
            uniform = min((lanes[token % 4] + 0.5) / 2**32, 1 - 2**-24)
            scores.append(logits[row, token].item() / 0.7 - math.log(-math.log1p(-uniform)))
        assert tokens[row] == scores.index(max(scores))


def test_greedy_rows_take_the_first_of_the_largest(run):
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0], [7.0, 5.0, 7.0, 7.0], [0.0, 1.0, 2.0, 3.0]])
    tokens, _ = run(logits, torch.arange(3), torch.tensor([0.0, 9e-6, 1e-6]))
    assert tokens.tolist() == [1, 0, 3]


def test_processed_log_probabilities_are_vllms(run):
    logits = _samples.normal((12, 331), torch.float32, "cpu", _samples.generator("processed"), 2.5)
    chosen = settings(*logits.shape)
    _, ours = run(logits, torch.arange(12), torch.full((12,), 0.6), **chosen, processed="logprobs")
    torch.testing.assert_close(ours, by_vllm(logits / 0.6, **chosen).log_softmax(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, INFINITY, -INFINITY])
@pytest.mark.parametrize("vocab_size", [5, 5000])
@pytest.mark.parametrize("chosen", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}, {"temperature": 0.0}])
def test_a_broken_row_gives_some_token(run, bad, vocab_size, chosen):
    logits = torch.zeros((2, vocab_size))
    logits[0], logits[1, 3] = bad, bad
    tensors = {name: torch.tensor([value, value]) for name, value in chosen.items()}
    tokens, _ = run(logits, torch.arange(2), **tensors)
    assert ((tokens >= 0) & (tokens < vocab_size)).all()


def faulty(
    scale=lambda x, temperature, greedy: x / temperature.masked_fill(greedy, 1.0).unsqueeze(1),
    min_p=keep_min_p,
    top_k=keep_top_k,
    top_p=keep_top_p,
    words=lambda keys, count: philox.words(keys, count),
    noise=philox.exponential,
    is_greedy=lambda temperature: temperature < 1e-5,
):
    """The reference with one of its steps replaced."""

    def run(logits, keys, temperature=None, top_k_=None, top_p_=None, min_p_=None, processed=None, **named):
        top_k_, top_p_, min_p_ = named.get("top_k", top_k_), named.get("top_p", top_p_), named.get("min_p", min_p_)
        if processed not in (None, "logits", "logprobs"):
            raise ValueError
        if keys is None:
            return ops.top_k_top_p_sample.reference(logits, keys, processed=processed)
        temperature = torch.ones(len(keys)) if temperature is None else temperature
        greedy = is_greedy(temperature)
        x = scale(logits, temperature, greedy).clone(memory_format=torch.contiguous_format)
        x = x if min_p_ is None else min_p(x, min_p_)
        x = x if top_k_ is None else top_k(x, top_k_)
        x = x if top_p_ is None else top_p(x, top_p_)
        score = relative_weights(x) / noise(words(keys, x.shape[1]), x.dtype)
        tokens = torch.where(greedy.unsqueeze(1), x, score).argmax(-1)
        return tokens, None if processed is None else x.log_softmax(-1) if processed == "logprobs" else x

    return run


def exactly_k(x, top_k):
    places = x.sort(dim=-1, descending=True, stable=True).indices.argsort(dim=-1)
    return x.masked_fill(places >= top_k.unsqueeze(1), -INFINITY)


def all_ties_of_top_p(x, top_p):
    least = keep_top_p(x, top_p).masked_fill(x == -INFINITY, INFINITY)
    least = least.masked_fill(least == -INFINITY, INFINITY).amin(dim=-1, keepdim=True)
    return x.masked_fill(x < least, -INFINITY)


def the_last_of_the_ties(x, top_p):
    return keep_top_p(x.flip(-1), top_p).flip(-1)


FAULTS = {
    "nothing is wrong": (faulty(), None),
    "multiplies by the temperature": (faulty(scale=lambda x, t, greedy: x * t.unsqueeze(1)), "temperatures"),
    "greedy rows are drawn": (faulty(is_greedy=lambda t: torch.zeros_like(t, dtype=torch.bool)), "greedy"),
    "ties beyond k are dropped": (faulty(top_k=exactly_k), "ties at the cut of top-k"),
    "k is one too many": (faulty(top_k=lambda x, k: keep_top_k(x, k + 1)), "top-k of 1"),
    "ties at the cut of top-p are all kept": (faulty(top_p=all_ties_of_top_p), "ties at the cut of top-p"),
    "the last ties are kept": (faulty(top_p=the_last_of_the_ties), "ties at the cut of top-p"),
    "top-p is a little too large": (faulty(top_p=lambda x, p: keep_top_p(x, p + 0.02)), "top-p from tiny"),
    "min-p is of one": (faulty(min_p=lambda x, p: x.masked_fill(x.softmax(-1) < p.unsqueeze(1), -INFINITY)), "min-p"),
    "noise is uniform": (faulty(noise=lambda words, dtype: (words.to(dtype) + 0.5) / 2**32), "property: distributed"),
    "half of the key counts": (
        faulty(words=lambda keys, count: philox.words(keys & philox.MASK, count)),
        "no settings",
    ),
    "the row's place counts": (
        faulty(words=lambda keys, count: philox.words(keys + torch.arange(len(keys)), count)),
        "property: independent of the batch",
    ),
    "the noise is too weak": (
        faulty(noise=lambda words, dtype: philox.exponential(words, dtype).pow(0.9)),
        "property: distributed as the kept probabilities",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_parity_finds(fault):
    broken, where = FAULTS[fault]
    checks = parity.check_kernel(OP, Kernel(OP.name, "broken", "test", ("cpu",), lambda problem: None, broken), "cpu")
    # The generator is lazy, because the first failing case is enough.
    failed = (check.case for check in checks if check.failure)
    assert any(case.startswith(where) for case in failed) if where else not list(failed)
