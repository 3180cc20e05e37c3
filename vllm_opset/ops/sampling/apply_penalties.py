"""apply_penalties: repetition, presence and frequency penalties on the logits of tokens that have occurred.

Semantics: vLLM's `apply_all_penalties` (`vllm/v1/sample/ops/penalties.py`) with the token lists already padded to
tensors. Presence and frequency are OpenAI's penalties, repetition is CTRL's (arXiv:1909.05858).
"""

from collections.abc import Iterator

import torch

from vllm_opset.ops import _properties, _samples
from vllm_opset.ops.contract import Cost, Problem, Sample, Tolerance, accumulator, op

TOLERANCES = {torch.float32: Tolerance(1e-6, 1e-6, "a product and two differences in fp32")}


@op(mutates=("logits",), dtypes=(torch.float32,), tolerances=TOLERANCES)
def apply_penalties(
    logits: torch.Tensor,
    prompt_token_ids: torch.Tensor,
    output_token_ids: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Changes, in place, the logits of the tokens that occur in a row's prompt or output, in this order:

    - Repetition applies to tokens in the prompt or the output: positive logits are divided by it, others multiplied.

    - Frequency is subtracted from the logit of a token once for each time it occurs in the output.

    - Presence is subtracted once from the logit of each token in the output.

    logits: fp32 [B, V], any strides; −inf stays −inf.

    prompt_token_ids: int64 [B, P], output_token_ids: int64 [B, O], padded anywhere with V; P and O may be zero. A token
    id outside 0 … V is an error of the caller, which is not always noticed.

    repetition: fp32 [B], above 0, 1 for off. presence, frequency: fp32 [B], 0 for off, negative to encourage.

    Zero rows are allowed.
    """
    in_prompt = occurrences(prompt_token_ids, logits) > 0
    count = occurrences(output_token_ids, logits)
    wide = logits.to(accumulator(logits))
    factor = repetition.unsqueeze(1)
    repeated = torch.where(wide > 0, wide / factor, wide * factor)
    wide = torch.where(in_prompt | (count > 0), repeated, wide)
    wide = wide - frequency.unsqueeze(1) * count - presence.unsqueeze(1) * (count > 0)
    logits.copy_(wide)


def occurrences(token_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """How often each token occurs in each row of token_ids, in the shape and dtype of the logits [B, V]."""
    num_rows, vocab_size = logits.shape
    counts = torch.zeros((num_rows, vocab_size + 1), dtype=logits.dtype, device=logits.device)
    counts.scatter_add_(1, token_ids, torch.ones_like(token_ids, dtype=logits.dtype))
    return counts[:, :vocab_size]


@apply_penalties.problem_of
def _(logits, prompt_token_ids, output_token_ids, repetition, presence, frequency) -> Problem:
    return Problem(logits.device.type, logits.dtype)


@apply_penalties.cost
def _(logits, prompt_token_ids, output_token_ids, repetition, presence, frequency) -> Cost:
    """Reads all token ids, and reads and writes the logits of the tokens that occur, because only these change."""
    given = (prompt_token_ids, output_token_ids)
    changed = int((sum(occurrences(ids, logits) for ids in given) > 0).sum())
    read = sum(ids.nbytes for ids in given) + 3 * repetition.nbytes
    return Cost(bytes=read + 2 * changed * logits.element_size(), flops=5 * changed)


def _sample(name: str, device: str, dtype, num_rows: int, vocab_size: int, prompt: int, output: int, **how) -> Sample:
    """A sample. prompt, output: the widths of the token lists.

    Every row has a random length up to the width; the first row of each list has no padding.
    """
    layout = how.get("layout", lambda logits: logits)

    def make():
        rng = _samples.generator(name)

        def token_ids(longest: int) -> torch.Tensor:
            # Squared, so that some tokens come up often.
            ids = (torch.rand((num_rows, longest), generator=rng).square() * vocab_size).long()
            lengths = torch.randint(0, longest + 1, (num_rows, 1), generator=rng)
            lengths[:1] = longest
            return ids.masked_fill(torch.arange(longest) >= lengths, vocab_size).to(device)

        def penalty(values: list[float]) -> torch.Tensor:
            return torch.tensor(values)[torch.arange(num_rows) % len(values)].to(device)

        logits = _samples.normal((num_rows, vocab_size), dtype, "cpu", rng, 3.0)
        logits = logits.masked_fill(torch.rand(logits.shape, generator=rng) < 0.05, -torch.inf)
        return (
            layout(logits.to(device)),
            token_ids(prompt),
            token_ids(output),
            penalty(how.get("repetition", [1.3, 0.8, 1.0])),
            penalty(how.get("presence", [0.0, 0.6, -0.5, 1.5, 0.0])),
            penalty(how.get("frequency", [0.0, 0.2, -0.1, 0.0])),
        ), {}

    return Sample(name, make)


@apply_penalties.sample_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(name: str, *shape: int, **how) -> Sample:
        return _sample(name, device, dtype, *shape, **how)

    off = {"repetition": [1.0], "presence": [0.0], "frequency": [0.0]}
    yield sample("zero rows", 0, 50, 4, 4)
    yield sample("no tokens yet", 3, 50, 0, 0)
    yield sample("prompts only", 3, 50, 20, 0)
    yield sample("a vocabulary of one", 2, 1, 3, 5)
    yield sample("a different mix in each row", 21, 131, 40, 90)
    yield sample("repetition only", 4, 97, 30, 30, **(off | {"repetition": [1.2, 0.5]}))
    yield sample("presence only", 4, 97, 30, 30, **(off | {"presence": [1.0, -1.0]}))
    yield sample("frequency only", 4, 97, 30, 200, **(off | {"frequency": [0.3, -0.3]}))
    yield sample("all off", 4, 97, 30, 30, **off)
    yield sample("strided rows", 5, 97, 30, 30, layout=_samples.row_view)
    yield sample("column-major", 5, 97, 30, 30, layout=_samples.column_major)
    yield sample("many tokens", 2, 20_011, 500, 700)


@apply_penalties.bench_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    for num_rows in (1, 16, 64, 256):
        for output in (128, 2048):
            name = f"B{num_rows} V151936 P1024 O{output}"
            yield _sample(name, device, dtype, num_rows, 151_936, 1024, output)


@apply_penalties.property_
def order_of_tokens_is_irrelevant(run, device: str, dtype: torch.dtype) -> None:
    """Reversing the token lists, which puts the padding first, changes no bit."""
    sample = _sample("order", device, dtype, 6, 61, 30, 40)
    (logits, prompt, output, *penalties), _ = sample.make()
    (others, *_), _ = sample.make()
    run(logits, prompt, output, *penalties)
    run(others, prompt.flip(1), output.flip(1), *penalties)
    _properties.equal("the order of the tokens changes the logits", others, logits)


@apply_penalties.property_
def independent_of_the_batch(run, device: str, dtype: torch.dtype) -> None:
    """A row comes out the same, bit for bit, alone and in a batch."""
    sample = _sample("batch", device, dtype, 6, 61, 30, 40)
    whole, _ = sample.make()
    run(*whole)
    for row in range(6):
        alone, _ = sample.make()
        alone = [tensor[row : row + 1] for tensor in alone]
        run(*alone)
        _properties.equal(f"row {row} depends on the batch", whole[0][row : row + 1], alone[0])
