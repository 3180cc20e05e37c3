"""Sampling at sizes that need a GPU: vocabularies of real size, and rows for each path through the kernel."""

import pytest
import torch

from vllm_opset import ops, parity
from vllm_opset.kernel import kernels_of
from vllm_opset.ops.sampling.top_k_top_p_sample import _sample

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: runs on one")
VOCAB_SIZE = 151_936


def normal(std, num_rows=6, vocab_size=VOCAB_SIZE):
    return lambda rng: torch.randn(num_rows, vocab_size, generator=rng) * std


def peaked(rng):
    """A dozen tokens far above the other, nearly equal ones, so that a sample of the row does not contain them."""
    logits, tokens = normal(1.5)(rng), torch.randint(0, VOCAB_SIZE, (6, 12), generator=rng)
    return logits.scatter(1, tokens, 14 + 2 * torch.randn(6, 12, generator=rng))


def some_forbidden(rng, finite=30):
    order = torch.rand(6, VOCAB_SIZE, generator=rng).argsort(dim=-1)
    return normal(2.0)(rng).scatter(1, order[:, finite:], -torch.inf)


ROWS = {
    "flat": normal(1.0),
    "between flat and peaked": normal(2.0),
    "less between flat and peaked": normal(2.7),
    "a wide vocabulary's usual": normal(3.75),
    "sharp": normal(20.0),
    "peaked": peaked,
    "with ties": lambda rng: normal(2.0)(rng).bfloat16().float(),
    "all equal": lambda rng: torch.full((6, VOCAB_SIZE), 1.25),
    "sorted": lambda rng: normal(3.0)(rng).sort(dim=-1, descending=True).values,
    "mostly forbidden": some_forbidden,
    "half forbidden": lambda rng: some_forbidden(rng, VOCAB_SIZE // 2),
    "odd width": normal(2.0, vocab_size=VOCAB_SIZE - 5),
}
SETTINGS = {
    "top-p": {"top_p": [0.9, 0.5, 0.97, 0.1, 1.0, 0.95]},
    "top-k": {"top_k": [50, 1, 1000, 20_000, 100_000, 3]},
    "top-k and top-p": {"top_k": [50, 1, 1000, 20_000, 100_000, 3], "top_p": [0.95, 0.5, 0.9]},
    "min-p": {"min_p": [0.1, 1e-3, 1.0, 1e-6, 0.0]},
    "min-p and top-p": {"min_p": [0.1, 1e-3, 1e-6], "top_p": [0.9, 0.3]},
    "nothing": {},
    "everything": {
        "temperature": [0.7, 1.0, 0.0, 3.0],
        "min_p": [0.0, 0.02, 0.0],
        "top_k": [VOCAB_SIZE - 5, 40, 500],
        "top_p": [0.9, 1.0, 0.6],
    },
}


@pytest.mark.parametrize("processed", ["logits", "logprobs", None])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("rows", ROWS)
def test_every_way_leads_to_the_reference(rows, settings, processed):
    sample = _sample(f"{rows}, {settings}", "cuda", ROWS[rows], processed=processed, **SETTINGS[settings])
    kernel = kernels_of("top_k_top_p_sample")["triton"]
    check = parity.check_sample(ops.top_k_top_p_sample, kernel, sample, torch.float32)
    assert check.outcome == "passed", check


def test_a_row_draws_the_same_in_every_batch_and_on_every_stream():
    """Compares bit for bit, including log-probabilities, while other batches are drawn at the same time."""
    run = kernels_of("top_k_top_p_sample")["triton"].run
    rng = torch.Generator().manual_seed(0)
    stds = torch.tensor([1.0, 2.0, 3.75, 8.0])[torch.arange(256) % 4]
    logits = (torch.randn(256, VOCAB_SIZE, generator=rng) * stds[:, None]).cuda()
    keys = torch.empty(256, dtype=torch.int64).random_(generator=rng).cuda()
    top_p = torch.tensor([0.9, 0.5, 0.99, 1.0, 0.7])[torch.arange(256) % 5].cuda()
    top_k = torch.tensor([VOCAB_SIZE, 50, VOCAB_SIZE], dtype=torch.int32)[torch.arange(256) % 3].cuda()
    whole = run(logits, keys, top_k=top_k, top_p=top_p, processed="logprobs")
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in range(4)], {}
    for row in range(0, 256, 7):
        with torch.cuda.stream(streams[row % 4]):
            some = slice(row, row + 1 + row % 3)
            found[some] = run(logits[some], keys[some], top_k=top_k[some], top_p=top_p[some], processed="logprobs")
    torch.cuda.synchronize()
    for some, (tokens, logprobs) in found.items():
        assert torch.equal(tokens, whole[0][some]) and torch.equal(logprobs, whole[1][some]), some


def test_again_and_again():
    """The programs of a row meet at one counter, a thousand times: any that reads too early gives another token."""
    run = kernels_of("top_k_top_p_sample")["triton"].run
    rng = torch.Generator().manual_seed(0)
    logits = (torch.randn(40, VOCAB_SIZE, generator=rng) * (1 + torch.arange(40) % 4)[:, None]).cuda()
    keys, top_p = torch.arange(40).cuda(), torch.tensor([0.9, 0.6]).repeat(20).cuda()
    first, _ = run(logits, keys, top_p=top_p)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = [run(logits, keys, top_p=top_p)[0] for _ in range(100)]
    for _ in range(10):
        for tokens in again:
            tokens.fill_(-1)
        graph.replay()
        assert all(torch.equal(tokens, first) for tokens in again)


def test_rows_beyond_32_bit_offsets():
    run = kernels_of("top_k_top_p_sample")["triton"].run
    num_rows = 2**31 // VOCAB_SIZE + 2
    logits = torch.empty(num_rows, VOCAB_SIZE, dtype=torch.bfloat16, device="cuda").normal_().mul_(3)
    keys, top_p = torch.arange(num_rows, device="cuda"), torch.full((num_rows,), 0.9, device="cuda")
    tokens, kept = run(logits, keys, top_p=top_p, processed="logits")
    for rows in (slice(0, 2), slice(-2, None)):
        some = run(logits[rows].clone(), keys[rows], top_p=top_p[rows], processed="logits")
        assert torch.equal(tokens[rows], some[0]) and torch.equal(kept[rows], some[1])
