"""apply_penalties against vLLM's own, by hand, and with faults that the contract must find.

tests/test_parity.py checks for all ops that kernels equal the reference and have the properties of the contract.
"""

import math

import pytest
import torch

from vllm_opset import ops, parity
from vllm_opset.kernel import Kernel, kernels_of
from vllm_opset.ops import _samples

OP = ops.apply_penalties
KERNELS = {kernel.name: kernel.run for kernel in kernels_of(OP.name).values() if kernel.runs_on("cpu")}


@pytest.fixture(params=KERNELS)
def run(request):
    return KERNELS[request.param]


@pytest.mark.parametrize("seed", range(3))
def test_agrees_with_vllm(run, seed):
    from vllm.v1.sample.ops.penalties import apply_all_penalties

    rng = _samples.generator(f"penalties {seed}")
    num_rows, vocab_size = 9, 71
    logits = _samples.normal((num_rows, vocab_size), torch.float32, "cpu", rng, 4.0)
    logits[:, 5] = -math.inf
    prompts = torch.randint(0, vocab_size + 1, (num_rows, 30), generator=rng)
    lengths = torch.randint(0, 90, (num_rows,), generator=rng).tolist()
    outputs = [torch.randint(0, vocab_size, (length,), generator=rng).tolist() for length in lengths]
    padded = torch.full((num_rows, 90), vocab_size)
    for row, ids in enumerate(outputs):
        padded[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
    presence, frequency = (_samples.normal((num_rows,), torch.float32, "cpu", rng, 1.0) for _ in range(2))
    repetition = torch.rand(num_rows, generator=rng) * 1.5 + 0.5
    theirs = apply_all_penalties(logits.clone(), prompts, presence, frequency, repetition, outputs)
    assert run(logits, prompts, padded, repetition, presence, frequency) is None
    torch.testing.assert_close(logits, theirs, rtol=1e-6, atol=1e-6)


def test_by_hand(run):
    """Token 0 is in the prompt, 1 in both, 2 three times in the output, 3 in neither; the fourth id is padding."""
    logits = torch.tensor([[4.0, -4.0, 4.0, 4.0]])
    prompt, output = torch.tensor([[0, 1, 4]]), torch.tensor([[4, 2, 1, 2, 2]])
    run(logits, prompt, output, torch.tensor([2.0]), torch.tensor([0.5]), torch.tensor([0.25]))
    assert logits.tolist() == [[2.0, -8.75, 0.75, 4.0]]


def broken(swap=False, once=False, prompt_counts=False, no_prompt=False, divides_all=False):
    def run(logits, prompt, output, repetition, presence, frequency):
        vocab_size = logits.shape[1]
        empty = prompt[:, :0]
        if swap:
            presence, frequency = frequency, presence
        if once:
            presence, frequency = presence + frequency, torch.zeros_like(frequency)
        if prompt_counts:
            output = torch.cat([prompt, output], dim=1)
        if no_prompt:
            prompt = empty
        if divides_all:
            seen = torch.zeros((len(logits), vocab_size + 1)).scatter_(1, torch.cat([prompt, output], 1), 1.0)[:, :-1]
            logits.copy_(torch.where((seen > 0) & (logits < 0), logits / repetition.square().unsqueeze(1), logits))
        OP(logits, prompt, output, repetition, presence, frequency)

    return run


FAULTS = {
    "nothing is wrong": {},
    "presence and frequency are swapped": {"swap": True},
    "frequency counts once": {"once": True},
    "the prompt counts as output": {"prompt_counts": True},
    "the prompt does not count": {"no_prompt": True},
    "negative logits are divided": {"divides_all": True},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_parity_finds(fault):
    kernel = Kernel(OP.name, "broken", "test", ("cpu",), lambda problem: None, broken(**FAULTS[fault]))
    failed = [check.case for check in parity.check_kernel(OP, kernel, "cpu") if check.failure]
    assert bool(failed) == bool(FAULTS[fault]), failed
