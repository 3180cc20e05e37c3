"""top_k_top_p_sample: draws one token per row from logits: temperature, min-p, top-k, top-p and the draw.

Semantics: vLLM's V1 sampler after its penalties: `Sampler.apply_temperature`, `MinPLogitsProcessor`,
`apply_top_k_top_p_pytorch`, `random_sample` and the greedy rows of `Sampler.sample`. This op also fixes three things
that vLLM leaves open: the choice among equal logits at the cut-off of top-p, the source of the randomness, and the
choice among equal scores.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vllm_opset.ops import _properties, _samples
from vllm_opset.ops.contract import Cost, Problem, Sample, Tolerance, accumulator, op
from vllm_opset.ops.sampling import _sampling_draws, philox

# vLLM's _SAMPLING_EPS.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True)
class TopKTopPSampleProblem(Problem):
    """vocab_size: the number of columns of the logits."""

    vocab_size: int


TOLERANCES = {
    torch.float32: Tolerance(4e-6, 4e-6, "one division; log-probabilities subtract a sum of exponentials in fp32")
}


@op(problem=TopKTopPSampleProblem, dtypes=(torch.float32,), tolerances=TOLERANCES)
def top_k_top_p_sample(
    logits: torch.Tensor,
    keys: torch.Tensor | None,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    processed: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draws one token per row from softmax(logits / temperature), restricted to the tokens that the filters keep.

    logits: fp32 [B, V], any strides, −inf for forbidden tokens. Each row needs a finite logit and must not hold NaN or
    +inf, or else the draw may return any token.

    keys: int64 [B], one per row and draw. None means that every row is greedy, whatever the settings. Then processed is
    None too.

    temperature: fp32 [B]. Below 1e-5 the row is greedy: its token is the one with the largest logit, and of equal ones
    the lowest index.

    top_k: int32 [B], 1 … V, V for off. top_p: fp32 [B], above 0, 1 for off. min_p: fp32 [B], 0 … 1, 0 for off.

    A setting of None switches its step off in all rows. No argument is written. Zero rows are allowed.

    The filters work on x = logits / temperature (on the logits in greedy rows), in this order:

    - min_p keeps the tokens whose probability is at least min_p times the largest probability.

    - top_k keeps the tokens with x >= the k-th largest x. Ties at the cut-off are kept, as by vLLM's sort.

    - top_p goes through the tokens in order of falling x, and among equal x in order of rising index. It keeps a token
      if the tokens before it sum to less than top_p. Probabilities are renormalised after the other filters. So among
      equal logits at the cut-off, the lowest indices are kept, as many as top_p needs. The Triton kernel in vLLM keeps
      the same ones. The sort in vLLM keeps as many, but not always the same ones. A kernel may use a stable sort, or
      search for the cut-off and count the equal logits below each index.

    The draw is an exponential argmax, as in vLLM: the token with the largest exp(x) / E, and of equal ones the lowest
    index. This is the same as adding Gumbel noise to x. E of token t in a row is −log(1 − u) with
    u = min((r + ½) / 2³², 1 − 2⁻²⁴). Here r is word t of the Philox4x32-10 stream of the row's key: lane t % 4 of
    Triton's `tl.randint4x(key, t // 4)`. So the token of a row depends only on its logits, settings and key, not on the
    device or the batch. With 32 random bits, tokens of probabilities below 1e-10 are not drawn as often as they should
    be. All other tokens are, up to the rounding of x.

    Returns (tokens, processed logits). The tokens are int64 [B]. With processed = "logits", the second result is x with
    −inf for the dropped tokens; with "logprobs" it is the log-softmax of that. Both are fp32 [B, V], contiguous. With
    None it is None. Raises ValueError for any other word, and for processed logits without keys.
    """
    check_processed(processed, keys)
    if keys is None:
        return logits.argmax(dim=-1), None
    x = logits.to(accumulator(logits)).clone(memory_format=torch.contiguous_format)
    greedy = torch.zeros_like(keys, dtype=torch.bool) if temperature is None else temperature < GREEDY_BELOW
    if temperature is not None:
        x = x / temperature.masked_fill(greedy, 1.0).unsqueeze(1)
    if min_p is not None:
        x = keep_min_p(x, min_p)
    if top_k is not None:
        x = keep_top_k(x, top_k)
    if top_p is not None:
        x = keep_top_p(x, top_p)
    noise = philox.exponential(philox.words(keys, x.shape[1]), x.dtype)
    score = torch.where(greedy.unsqueeze(1), x, relative_weights(x) / noise)
    if processed == "logprobs":
        x = x.log_softmax(dim=-1)
    return score.argmax(dim=-1), None if processed is None else x


def check_processed(processed: str | None, keys: torch.Tensor | None) -> None:
    if processed not in (None, "logits", "logprobs"):
        raise ValueError(f"processed is None, 'logits' or 'logprobs', not {processed!r}")
    if processed is not None and keys is None:
        raise ValueError(f"without keys, only tokens are given, not processed {processed}")


def relative_weights(x: torch.Tensor) -> torch.Tensor:
    """Probabilities as multiples of the largest one: exp(x − max x)."""
    return torch.exp(x - x.amax(dim=-1, keepdim=True))


def keep_min_p(x: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """x [B, n] with −inf for the tokens that min_p [B] drops."""
    return x.masked_fill(relative_weights(x) < min_p.unsqueeze(1), -torch.inf)


def keep_top_k(x: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """x [B, n] with −inf for the tokens that top_k [B] drops; a k beyond n drops nothing."""
    last = (top_k.long().clamp(max=x.shape[1]) - 1).unsqueeze(1)
    return x.masked_fill(x < x.sort(dim=-1, descending=True).values.gather(1, last), -torch.inf)


def keep_top_p(x: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """x [B, n] with −inf for the tokens that top_p [B] drops."""
    ordered, order = x.sort(dim=-1, descending=True, stable=True)
    # From the small end, as vLLM does it, where the sum is precise.
    remaining = ordered.softmax(dim=-1).flip(-1).cumsum(dim=-1).flip(-1)
    drop = (remaining <= 1 - top_p.unsqueeze(1)) & (top_p < 1).unsqueeze(1)
    drop[:, :1] = False
    return x.masked_fill(drop.scatter(1, order, drop), -torch.inf)


@top_k_top_p_sample.problem_of
def _(logits, keys, temperature=None, top_k=None, top_p=None, min_p=None, processed=None) -> TopKTopPSampleProblem:
    return TopKTopPSampleProblem(logits.device.type, logits.dtype, logits.shape[1])


@top_k_top_p_sample.cost
def _(logits, keys, temperature=None, top_k=None, top_p=None, min_p=None, processed=None) -> Cost:
    settings = [tensor.nbytes for tensor in (keys, temperature, top_k, top_p, min_p) if tensor is not None]
    tokens = len(logits) * torch.int64.itemsize
    written = 0 if processed is None else logits.numel() * logits.element_size()
    read = logits.numel() * logits.element_size()
    # Each logit needs at least one comparison. Tokens that the filters drop need no exponential and no noise.
    return Cost(bytes=read + sum(settings) + tokens + written, flops=logits.numel())


def _keys(num_rows: int, device: str, rng: torch.Generator) -> torch.Tensor:
    """Keys of either sign, so that all 64 bits count."""
    return torch.empty(num_rows, dtype=torch.int64).random_(-(2**63), None, generator=rng).to(device)


def _between_steps(logits: torch.Tensor, top_p: torch.Tensor, others: dict) -> torch.Tensor:
    """Moves top_p to the middle of its step of the cumulative probability.

    So the order in which a kernel sums probabilities cannot change the kept tokens.
    """
    kept = top_k_top_p_sample(
        logits.double(), torch.zeros(len(logits), dtype=torch.int64), processed="logits", **others
    )[1]
    mass = kept.softmax(dim=-1).sort(dim=-1, descending=True).values.cumsum(dim=-1)
    after = torch.searchsorted(mass, top_p.double().unsqueeze(1)).clamp(max=mass.shape[1] - 1)
    before = torch.where(after > 0, mass.gather(1, (after - 1).clamp(min=0)), 0.0)
    return torch.where(top_p < 1, (before + mass.gather(1, after)).squeeze(1) / 2, 1.0).float()


def _sample(
    name: str, device: str, make_logits, *, processed="logits", layout=lambda logits: logits, **settings
) -> Sample:
    """A sample. make_logits: random generator -> fp32 [B, V]. Each setting is a list, repeated over the rows."""
    dtypes = {"top_k": torch.int32}

    def make():
        rng = _samples.generator(name)
        logits = make_logits(rng)
        rows = torch.arange(len(logits))
        given = {
            key: torch.tensor(values, dtype=dtypes.get(key, torch.float32))[rows % len(values)]
            for key, values in settings.items()
        }
        if "top_p" in given:
            given["top_p"] = _between_steps(logits, given.pop("top_p"), given)
        given = {key: values.to(device) for key, values in given.items()}
        return (layout(logits.to(device)), _keys(len(logits), device, rng)), given | {"processed": processed}

    return Sample(name, make)


@top_k_top_p_sample.sample_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(name, make_logits, **settings) -> Sample:
        return _sample(name, device, make_logits, **settings)

    def greedy(name, make_logits, layout=lambda logits: logits) -> Sample:
        return Sample(name, lambda: ((layout(make_logits(_samples.generator(name)).to(device)), None), {}))

    def normal(num_rows: int, vocab_size: int, std: float = 2.0):
        return lambda rng: _samples.normal((num_rows, vocab_size), dtype, "cpu", rng, std)

    def quantised(num_rows: int, vocab_size: int):
        return lambda rng: torch.randint(-4, 5, (num_rows, vocab_size), generator=rng).to(dtype) / 2

    def likely_ends(num_rows: int, vocab_size: int):
        ends = torch.tensor([0, vocab_size - 1])
        return lambda rng: normal(num_rows, vocab_size)(rng).index_fill(1, ends, 8.0)

    def likeliest_last(num_rows: int, vocab_size: int):
        return lambda rng: normal(num_rows, vocab_size, 0.1)(rng).index_add(
            1, torch.arange(vocab_size - 8, vocab_size), torch.full((num_rows, 8), 11.0, dtype=dtype)
        )

    def sparse(num_rows: int, vocab_size: int, finite: int):
        def make(rng):
            logits = _samples.normal((num_rows, vocab_size), dtype, "cpu", rng, 2.0)
            order = torch.rand((num_rows, vocab_size), generator=rng).argsort(dim=-1)
            return logits.scatter(1, order[:, finite:], -torch.inf)

        return make

    every = {"temperature": [0.7, 0.0, 1.0, 2.5, 1.3], "min_p": [0.0, 0.05, 0.0], "top_p": [0.9, 1.0, 0.6, 0.99]}
    yield sample("zero rows", normal(0, 64), top_k=[5], top_p=[0.9])
    yield sample("a vocabulary of one", normal(3, 1), top_k=[1], top_p=[0.5], min_p=[0.5])
    yield sample("no settings", normal(4, 97))
    yield sample("tokens only", normal(4, 97), processed=None, top_k=[9], **every)
    yield sample("log-probabilities", normal(7, 97), processed="logprobs", top_k=[9, 97], **every)
    yield sample("temperatures, greedy rows among them", normal(6, 130), temperature=[0.0, 0.3, 1.0, 9e-6, 2.5])
    yield sample("top-k of 1, 2, 50 and off", normal(8, 131), top_k=[1, 2, 50, 131])
    yield sample("top-p from tiny to off", normal(10, 131), top_p=[1e-6, 0.3, 0.9, 0.999, 1.0])
    yield sample("min-p from off to 1", normal(8, 131), min_p=[0.0, 0.02, 0.3, 1.0])
    yield sample("everything, a different mix in each row", normal(20, 997), top_k=[40, 997, 200, 7], **every)
    yield sample("filters that are off", normal(3, 65), temperature=[1.0], top_k=[65], top_p=[1.0], min_p=[0.0])
    yield sample("ties at the cut of top-k", quantised(6, 70), top_k=[1, 5, 30])
    yield sample("ties at the cut of top-p", quantised(6, 70), top_p=[0.2, 0.6, 0.95])
    yield sample("ties at both cuts", quantised(6, 300), top_k=[30, 7], top_p=[0.3, 0.7, 0.9])
    yield sample("all logits equal", lambda rng: torch.full((4, 80), 1.5, dtype=dtype), top_p=[1.0, 0.5], top_k=[80, 9])
    yield sample("greedy, equal maxima", quantised(5, 200), temperature=[0.0])
    yield greedy("every row greedy, equal maxima", quantised(5, 200))
    yield greedy("every row greedy, many tokens", normal(4, 20_011))
    yield greedy("every row greedy, strided rows", quantised(5, 129), layout=_samples.row_view)
    yield greedy("every row greedy, zero rows", normal(0, 64))
    yield sample("forbidden tokens", sparse(6, 300, 20), top_k=[50, 300, 5], **every)
    yield sample("one token allowed", sparse(5, 150, 1), top_k=[50, 150], **every)
    yield sample("very sharp", normal(6, 200, std=40.0), top_k=[200, 20], top_p=[0.9, 1.0], temperature=[1.0, 0.5])
    yield sample("strided rows", normal(5, 129), layout=_samples.row_view, top_k=[20, 129], **every)
    yield sample("column-major", normal(5, 129), layout=_samples.column_major, top_k=[20, 129], **every)
    odd, even = {"top_k": [40, 5003, 5003, 7]}, {"top_k": [20, 8192, 31, 8192, 1]}
    yield sample("more tokens", normal(20, 5003, std=4.0), layout=_samples.row_view, **odd, **every)
    yield sample("more tokens, tokens only", normal(20, 5003, std=4.0), processed=None, **odd, **every)
    yield sample("more tokens, unfiltered", normal(4, 5003, std=12.0), processed=None, temperature=[1.0, 0.0])
    yield sample("a multiple of 64", normal(20, 8192, std=3.0), layout=_samples.row_view, **even, **every)
    yield sample("a multiple of 64, tokens only", normal(20, 8192, std=3.0), processed=None, **even, **every)
    yield sample("a multiple of 64, ties", quantised(6, 8192), top_k=[30, 1, 8192], top_p=[0.9, 1.0, 0.1])
    yield sample("more tokens, most of them forbidden", sparse(6, 5003, 90), top_k=[100, 5003, 20], **every)
    yield sample("more tokens, the first and the last likeliest", likely_ends(6, 8192), top_k=[31, 7], **every)
    yield sample("more tokens, zero rows", normal(0, 4096), top_k=[5])
    yield sample("one row, many tokens", normal(1, 20_011), top_k=[50], top_p=[0.9], temperature=[0.8])
    yield sample("many tokens, top-p after a large k", normal(4, 20_011), top_k=[2000], top_p=[0.2], temperature=[0.8])
    yield sample("many tokens, unfiltered and top-p", normal(3, 20_011), top_p=[1.0, 0.9], temperature=[0.8])
    # Nearly equal logits, of which a token that is kept by mistake is likely to be drawn.
    few, drawn = normal(24, 97, std=0.2), {"processed": None, "top_k": [2, 97, 4]}
    yield sample("nearly equal, top-k, tokens only", few, **drawn)
    yield sample("nearly equal, all filters, tokens only", few, **drawn, top_p=[0.5, 1.0, 0.3, 0.8], min_p=[0.0, 0.9])
    yield sample("many tokens, top-k, tokens only", normal(4, 20_011), processed=None, top_k=[50, 20_011, 2000, 1])
    # A kernel that estimates the cut-off from a sample of a row may miss its likeliest tokens.
    last = {"processed": None, "top_p": [0.3, 0.4]}
    yield sample("many tokens, the last eight likeliest, tokens only", likeliest_last(2, 20_011), **last)
    all_but = [20_011, 20_011, 20_011, 18_000, 20_011]
    many = {"top_p": [0.9, 0.5, 1.0, 1.0, 0.7], "min_p": [0.0, 0.0, 0.3, 0.0, 0.3], "top_k": all_but}
    yield sample("many tokens, most of them kept", normal(5, 20_011, std=0.5), **many)


@top_k_top_p_sample.illegal_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    yield _sample("another kind of output", device, lambda rng: torch.zeros(2, 5), processed="probabilities")
    logits = torch.zeros(2, 5, device=device)
    yield Sample("processed logits without keys", lambda: ((logits, None), {"processed": "logits"}))


@top_k_top_p_sample.bench_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    vocab_size = 151_936  # Qwen3's
    cases = {
        "k50 p0.95": {"top_k": 50, "top_p": 0.95},
        "p0.9": {"top_p": 0.9},
        "k50": {"top_k": 50},
        "unfiltered": {},
        "greedy": {"temperature": 0.0},
        "every row greedy": {},
        "p0.9, flat": {"top_p": 0.9, "temperature": 3.0},  # 61 % of the tokens are kept
    }

    def sample(num_rows: int, case: str) -> Sample:
        def make():
            rng = _samples.generator(f"{num_rows} {case}")
            logits = _samples.normal((num_rows, vocab_size), dtype, device, rng, 3.0)
            if case == "every row greedy":
                return (logits, None), {}
            dtypes = {"top_k": torch.int32}
            settings = {
                key: torch.full((num_rows,), value, dtype=dtypes.get(key, torch.float32), device=device)
                for key, value in ({"temperature": 0.8} | cases[case]).items()
            }
            return (logits, _keys(num_rows, device, rng)), settings

        return Sample(f"B{num_rows} V{vocab_size} {case}", make)

    for num_rows in (1, 16, 64, 256):
        for case in cases:
            yield sample(num_rows, case)


top_k_top_p_sample.random_input(_sampling_draws.draw)


@top_k_top_p_sample.property_
def independent_of_the_batch(run, device: str, dtype: torch.dtype) -> None:
    """A row's token and its processed logits are the same, bit for bit, alone and in any place of any batch."""
    rng = _samples.generator("batch")
    logits, keys = _samples.normal((12, 333), dtype, device, rng, 2.0), _keys(12, device, rng)
    cycle = torch.arange(12) % 4
    settings = {
        "temperature": torch.tensor([1.0, 0.0, 0.5, 1.7])[cycle].to(device),
        "top_k": torch.tensor([333, 20, 333, 5], dtype=torch.int32)[cycle].to(device),
        "top_p": torch.tensor([0.8, 1.0, 1.0, 0.9])[cycle].to(device),
    }
    tokens, kept = run(logits, keys, **settings, processed="logits")
    for rows in (torch.arange(11, -1, -1), torch.tensor([3]), torch.tensor([6, 0, 5])):
        rows = rows.to(device)
        some = run(
            logits[rows], keys[rows], **{key: value[rows] for key, value in settings.items()}, processed="logits"
        )
        _properties.equal("the tokens of a row depend on its place", some[0], tokens[rows])
        _properties.equal("what a row keeps depends on its place", some[1], kept[rows])


@top_k_top_p_sample.property_
def top_k_of_one_is_greedy(run, device: str, dtype: torch.dtype) -> None:
    """The only token left is drawn, whatever the key and the temperature."""
    rng = _samples.generator("one")
    logits = _samples.normal((16, 257), dtype, device, rng, 2.0)
    settings = {"temperature": torch.full((16,), 1.5), "top_k": torch.ones(16, dtype=torch.int32)}
    tokens, _ = run(logits, _keys(16, device, rng), **{key: value.to(device) for key, value in settings.items()})
    _properties.equal("the one token that is left is not the likeliest", tokens, logits.argmax(dim=-1))


@top_k_top_p_sample.property_
def rows_are_greedy_below_a_temperature_of_1e_5(run, device: str, dtype: torch.dtype) -> None:
    """With nearly equal logits, a row always takes the largest one below the bound, and also others above it."""
    logits = (torch.arange(24, dtype=dtype, device=device) * 1e-6).expand(16, -1)
    keys = _keys(16, device, _samples.generator("bound"))
    below, above = (run(logits, keys, torch.full((16,), value, device=device))[0] for value in (9e-6, 1.1e-5))
    assert (below == 23).all(), "draws at a temperature of 9e-6"
    assert (above != 23).any(), "is greedy at a temperature of 1.1e-5"


@top_k_top_p_sample.property_
def distributed_as_the_kept_probabilities(run, device: str, dtype: torch.dtype) -> None:
    """Draws follow the exact probabilities, by a chi-square test of 10,000 draws (_samples.DRAWS) for each setting.

    A correct implementation with random keys would fail one such test in a million. These keys are always the same, so
    the verdict is always the same too.
    """
    draws, vocab_size = _samples.DRAWS, 24
    rng = _samples.generator("draws")
    logits = _samples.normal((1, vocab_size), dtype, "cpu", rng)
    off = {"temperature": 1.0, "top_k": vocab_size, "top_p": 1.0, "min_p": 0.0}
    for setting in ({"temperature": 1.4}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1, "top_k": 12, "top_p": 0.95}):
        one = {key: torch.tensor([value]) for key, value in (off | setting).items()}
        one["top_k"] = one["top_k"].int()
        _, expected = top_k_top_p_sample(
            logits.double(), torch.zeros(1, dtype=torch.int64), **one, processed="logprobs"
        )
        many = {key: value.repeat(draws).to(device) for key, value in one.items()}
        tokens, _ = run(logits.to(device).expand(draws, -1), _keys(draws, device, rng), **many)
        counts = tokens.cpu().bincount(minlength=vocab_size).double()
        expected = expected[0].exp() * draws
        kept = expected > 0
        assert counts[~kept].sum() == 0, f"{setting}: drew a token that is not kept"
        chi_square = ((counts - expected)[kept].square() / expected[kept]).sum()
        false_alarm = torch.special.gammaincc((kept.sum() - 1).double() / 2, chi_square / 2).item()
        assert false_alarm > 1e-6, f"{setting}: chi-square {chi_square:.1f}, as likely as {false_alarm:.1e}"
