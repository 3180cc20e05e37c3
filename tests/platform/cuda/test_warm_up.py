"""The warm-up compiles every kernel that paged_attention launches for any batch. Launches are recorded."""

import contextlib
import functools
import importlib.util
import itertools
import random
import threading
from types import SimpleNamespace

import pytest
import torch
from paged_launches import record_launches
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.worker.gpu.sample import logprob

from vllm_opset.attention.images import ImageTokens
from vllm_opset.attention.impl import OpsetAttentionImpl
from vllm_opset.kernels.triton import _launch
from vllm_opset.ops.attention.paged_batch import PagedBatch
from vllm_opset.ops.schemes import FP8
from vllm_opset.platform.cuda import warm_up

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or not importlib.util.find_spec("triton"),
    reason="launches nothing, for a Hopper GPU that is not there: runs where there is Triton, and no GPU",
)

MULTIPROCESSORS = 132
HEAD_SIZE, BLOCK_SIZE = 128, 16
NUM_BATCHES = 400
# KV heads, query heads of each KV head, and the largest numbers: tokens of a step, requests, and length.
SETTINGS = {
    "usual": (8, 4, 8192, 256, 40960),
    "chunks": (8, 4, 2048, 256, 32768),
    "no groups": (32, 1, 8192, 256, 32768),
    "one KV head": (1, 4, 8192, 1024, 32768),
    "short": (8, 4, 512, 16, 384),
    "small steps": (8, 4, 128, 64, 1024),
    "one KV head, short": (1, 8, 8192, 256, 512),
    "as many KV heads as query heads": (40, 1, 8192, 256, 40960),
    "two KV heads, no groups": (2, 1, 2048, 128, 32768),
    "large groups, small steps": (2, 8, 512, 16, 384),
    "as many requests as tokens": (4, 4, 256, 256, 8192),
}


@pytest.fixture
def launched(monkeypatch):
    """A set that collects the names and constants of all launches."""
    from vllm_opset.kernels.triton import paged_attention

    variants = set()

    def record(name: str, inputs: tuple, options: dict) -> None:
        absent = tuple(value is None for value in inputs)
        variants.add((name, absent, tuple(sorted(options.items()))))

    record_launches(monkeypatch, record)
    monkeypatch.setattr(paged_attention._launch, "multiprocessors", lambda device: MULTIPROCESSORS)
    return variants


def layer(
    num_kv_heads: int, group: int, images: bool = False, cache_dtype: torch.dtype = torch.bfloat16
) -> SimpleNamespace:
    from vllm_opset.kernels.triton.paged_attention import VARIANTS, paged_attention

    impl = OpsetAttentionImpl(num_kv_heads * group, HEAD_SIZE, HEAD_SIZE**-0.5, num_kv_heads)
    impl.dtype, impl.problem, impl.variants = torch.bfloat16, "one of a kind", VARIANTS
    impl._attend = functools.partial(paged_attention, scale=impl.scale, window=impl.window)
    impl._attend_within_images, impl.attends_within_images = impl._attend, images
    impl.caches_fp8 = cache_dtype == FP8
    cache = torch.zeros(4, num_kv_heads, BLOCK_SIZE, 2 * HEAD_SIZE, dtype=cache_dtype)
    assert impl.attn_type == AttentionType.DECODER
    return SimpleNamespace(impl=impl, kv_cache=cache, _k_scale=torch.ones(1), _v_scale=torch.ones(1))


def worker(served: SimpleNamespace, most_tokens: int, most_requests: int, longest: int) -> SimpleNamespace:
    """The attributes of a worker that the warm-up uses."""
    table = torch.zeros(1, -(-longest // BLOCK_SIZE), dtype=torch.int32)
    runner = SimpleNamespace(
        device=torch.device("cpu"),
        is_pooling_model=False,
        compilation_config=SimpleNamespace(static_forward_context={"layer": served}),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["layer"])]),
        input_batch=SimpleNamespace(
            block_table=SimpleNamespace(block_tables=[SimpleNamespace(get_device_tensor=lambda rows: table)])
        ),
    )
    return SimpleNamespace(
        model_runner=runner,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=most_tokens, max_num_seqs=most_requests),
        model_config=SimpleNamespace(max_model_len=longest, is_moe=False, is_mm_prefix_lm=False),
    )


def batches(most_tokens: int, most_requests: int, longest: int):
    """(query tokens, contexts) of the requests of random steps: decode, prompts and chunks, and mixed. Some have a
    single request that does not decode.
    """
    draw = random.Random(0)
    for _ in range(NUM_BATCHES):
        left, requests = most_tokens, []
        longest_query = draw.choice((1, 1, 4, 64, 100, 127, 300, longest))
        for _ in range(draw.choice((1, 2, 8, most_requests))):
            query = min(left, draw.choice((1, draw.randint(1, longest_query))) if requests else longest_query)
            if query:
                requests.append((query, draw.choice((query, draw.randint(query, longest), longest))))
                left -= query
        yield requests


def test_images_launch_what_was_launched_before(launched):
    """The tokens of each image are a request of a batch that is not causal."""
    num_kv_heads, group, *limits = SETTINGS["usual"]
    served = layer(num_kv_heads, group, images=True)
    warm_up._attention(worker(served, *limits))
    warm = set(launched)
    for images, tokens, context in itertools.product((1, 2, 7, 30), (5, 60, 256), (300, 8000, 40960)):
        query = torch.empty(images * tokens, num_kv_heads * group, HEAD_SIZE, dtype=torch.bfloat16)
        starts = torch.arange(images + 1, dtype=torch.int32) * tokens
        lens, table = torch.full((images,), context, dtype=torch.int32), torch.zeros(images, 1, dtype=torch.int32)
        batch = PagedBatch(starts, lens, table, tokens, context, causal=False)
        seen = ImageTokens(torch.arange(images * tokens), batch)
        served.impl.attend_within_images(served, query, served.kv_cache, seen, torch.empty_like(query))
        assert launched == warm, f"{images} images of {tokens} tokens"


@pytest.mark.parametrize(
    ("setting", "cache_dtype"),
    [*((setting, torch.bfloat16) for setting in SETTINGS), ("usual", FP8), ("two KV heads, no groups", FP8)],
)
def test_all_that_serving_launches_was_launched_before(setting, cache_dtype, launched):
    num_kv_heads, group, *limits = SETTINGS[setting]
    served = layer(num_kv_heads, group, cache_dtype=cache_dtype)
    warm_up._attention(worker(served, *limits))
    warm = set(launched)
    for requests in batches(*limits):
        queries, contexts = zip(*requests, strict=True)
        query = torch.empty(sum(queries), num_kv_heads * group, HEAD_SIZE, dtype=torch.bfloat16)
        starts = torch.tensor([0, *torch.tensor(queries).cumsum(0)], dtype=torch.int32)
        lens, table = torch.tensor(contexts, dtype=torch.int32), torch.zeros(len(requests), 1, dtype=torch.int32)
        batch = PagedBatch(starts, lens, table, max(queries), max(contexts))
        served.impl.attend(served, query, served.kv_cache, batch, torch.empty_like(query))
        assert launched == warm, f"{len(requests)} requests, up to {max(queries)} of {max(contexts)} tokens"


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "head_size"),
    [(torch.bfloat16, torch.bfloat16, HEAD_SIZE), (torch.float32, torch.float32, HEAD_SIZE), (torch.bfloat16, FP8, 64)],
)
@pytest.mark.parametrize("setting", SETTINGS)
def test_partial_results_fit_the_memory_that_is_kept_free(
    setting, dtype, cache_dtype, head_size, launched, monkeypatch
):
    """Covers steps of requests with drafts too, whose tiles are the largest."""
    from vllm_opset.kernels.triton import paged_attention

    num_kv_heads, group, most_tokens, most_requests, longest = SETTINGS[setting]
    taken = []

    def workspace(batch: PagedBatch, num_parts: int, rows: int, columns: int) -> tuple[None, None]:
        taken.append(4 * num_parts * rows * (columns + 2))
        return None, None

    monkeypatch.setattr(paged_attention._call, "workspace", workspace)
    heads = num_kv_heads * group
    num_reqs, cpu = min(most_requests, most_tokens), torch.device("cpu")
    kept = paged_attention.most_workspace(heads, num_kv_heads, head_size, dtype, num_reqs, cpu)
    cache = torch.zeros(4, num_kv_heads, BLOCK_SIZE, 2 * head_size, dtype=cache_dtype)
    drafted = ([(1 + n, longest)] * min(most_requests, most_tokens // (1 + n)) for n in range(64))
    for requests in itertools.chain(batches(most_tokens, most_requests, longest), drafted):
        queries, contexts = zip(*requests, strict=True)
        query = torch.empty(sum(queries), heads, head_size, dtype=dtype)
        starts = torch.tensor([0, *torch.tensor(queries).cumsum(0)], dtype=torch.int32)
        lens, table = torch.tensor(contexts, dtype=torch.int32), torch.zeros(len(requests), 1, dtype=torch.int32)
        batch = PagedBatch(starts, lens, table, max(queries), max(contexts))
        paged_attention.paged_attention(query, cache, batch, torch.empty_like(query), scale=1.0)
    assert kept / 4 < max(taken) <= kept


@pytest.mark.parametrize(("form", "batches"), [("cuda", 1), ("cuda", 2), ("native", 1)])
def test_partial_results_are_held_while_vllm_measures(form, batches, launched, monkeypatch):
    """They are returned afterwards, since steps allocate them. Images are a second batch."""
    from vllm.v1.worker.gpu_worker import Worker

    from vllm_opset.platform.cuda import workspace

    cls, held, during = worker_class(form), [], []
    monkeypatch.setattr(workspace, "kv_cache_groups", lambda config, spec: [spec, spec])
    monkeypatch.setattr(workspace.torch, "empty", lambda size, **_: Held(size, held))

    def measure(self) -> None:
        during.append([*held])
        self.model_runner.profile_run(randomize_inputs=True)
        during.append([*held])

    monkeypatch.setattr(Worker, "determine_available_memory", measure)
    measured = cls.__new__(cls)
    vars(measured).update(vars(worker(layer(40, 1), 8192, 1024, 4096)))
    measured.vllm_config = SimpleNamespace(compilation_config=measured.model_runner.compilation_config)
    measured.model_runner = Runner(measured.model_runner, lambda: during.append([*held]))
    measured.model_config.is_mm_prefix_lm = batches == 2
    measured.determine_available_memory()
    tiles = (2 * MULTIPROCESSORS // 40 + 1024) * 40  # verify has two programs a multiprocessor
    assert during == [[], [batches * 2 * tiles * 64 * (HEAD_SIZE + 2) * 4], []]
    assert measured.model_runner.profile_run == Runner.profile_run.__get__(measured.model_runner)


def worker_class(form: str) -> type:
    module = importlib.import_module(f"vllm_opset.platform.{form}.worker")
    (cls,) = [cls for cls in vars(module).values() if isinstance(cls, type) and cls.__module__ == module.__name__]
    return cls


@pytest.mark.parametrize("method", ["determine_available_memory", "initialize_from_config"])
@pytest.mark.parametrize("form", ["cuda", "native"])
def test_too_little_memory_is_said_with_the_cure(form, method, monkeypatch):
    from vllm.v1.worker.gpu_worker import Worker

    def fail(*args) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr(Worker, method, fail)
    started = worker_class(form).__new__(worker_class(form))
    started.model_runner = SimpleNamespace(profile_run=None)
    given = (None,) if method == "initialize_from_config" else ()
    with pytest.raises(RuntimeError, match=r"lower --max-num-batched-tokens and --max-num-seqs, .* Tried to allocate"):
        getattr(started, method)(*given)


class Held:
    """A tensor that is listed while it is alive."""

    def __init__(self, size: int, held: list[int]) -> None:
        self.size, self.held = size, held
        held.append(size)

    def __del__(self) -> None:
        self.held.remove(self.size)


class Runner(SimpleNamespace):
    def __init__(self, runner: SimpleNamespace, profile) -> None:
        super().__init__(**vars(runner))
        self.profile = profile

    def profile_run(self, randomize_inputs: bool) -> None:
        self.profile()

    def get_kv_cache_spec(self) -> dict:
        return {}


@pytest.mark.parametrize("knows", ["attention alone", "something else"])
def test_steps_are_precompiled_where_any_values_will_do(knows, monkeypatch):
    """In that case all steps are run, including the longest. Calls launch all kernels that numbers of tokens take."""
    called, within = [], []

    @contextlib.contextmanager
    def precompile():
        within.append(True)
        yield
        within.clear()

    monkeypatch.setattr(warm_up, "precompile", precompile)
    monkeypatch.setattr(warm_up, "_attention", lambda worker: called.append(("attention", bool(within))))
    monkeypatch.setattr(
        warm_up, "_step", lambda runner, n: called.append((n if _launch.is_warm_up() else "launches one", bool(within)))
    )
    monkeypatch.setattr(warm_up.linear, "multiply", lambda model, most_rows: called.append(("linear", bool(within))))
    served = worker(Attention.__new__(Attention) if knows == "attention alone" else torch.nn.Module(), 5000, 8, 4096)
    runner = served.model_runner
    served.models, runner.lora_config, runner.maybe_remove_all_loras = [None], None, lambda config: None
    runner.device = torch.device("cpu")
    sizes = [1 << n for n in range(13)] + [5000]
    monkeypatch.setattr(warm_up, "warm_sizes", lambda device, largest: [size for size in sizes if size <= largest])
    warm_up.model(served)
    expected = ["attention", "linear", *(sizes[:12] if knows == "attention alone" else [])]
    assert [what for what, inside in called if inside] == expected
    assert [what for what, inside in called if not inside] == ["attention", *sizes]


@pytest.fixture
def default_bf16():
    """The default dtype of PyTorch while vLLM loads a model in bf16."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("second", [True, False])
def test_draws_are_compiled_in_another_thread_while_a_model_loads(second, default_bf16, monkeypatch):
    called, precompiling = [], []

    @contextlib.contextmanager
    def precompile():
        precompiling.append(threading.get_ident())
        yield
        precompiling.clear()

    def draw(logits, keys, temperature, processed, **given):
        assert precompiling == [threading.get_ident()] != [threading.main_thread().ident]
        assert temperature.dtype == torch.float32 and processed is None
        called.append((logits.dtype, frozenset(given)))

    monkeypatch.setattr(warm_up, "precompile", precompile)
    monkeypatch.setattr(warm_up.selection, "select", lambda op, problem: SimpleNamespace(run=draw))
    monkeypatch.setattr(warm_up.torch.cuda, "set_device", lambda device: called.append(device))
    config = SimpleNamespace(dtype=torch.bfloat16, head_dtype=torch.bfloat16, get_vocab_size=lambda: 32)
    device, vllm_config = torch.device("cpu"), SimpleNamespace(use_v2_model_runner=second)
    with warm_up.draws_meanwhile(SimpleNamespace(model_config=config, vllm_config=vllm_config, device=device)):
        assert threading.get_ident() not in precompiling
    sets = {
        frozenset(names) for size in range(4) for names in itertools.combinations(("top_k", "top_p", "min_p"), size)
    }
    dtypes = [torch.bfloat16, torch.float32] if second else [torch.float32]
    assert called[0] == device and len(called) == 1 + 8 * len(dtypes)
    everything = [given == {"top_k", "top_p", "min_p"} for _, given in called[1:]]
    assert everything == sorted(everything, reverse=True), "what compiles longest has to begin first"
    assert set(called[1:]) == set(itertools.product(dtypes, sets))


@pytest.mark.parametrize("most", [0, 1, 5, 20, 47, 1024])
def test_every_number_of_logprobs_is_warm(most):
    def variants(numbers) -> set[tuple]:
        return {(1 << n.bit_length(), n == 0, (n + 1) % 16 == 0) for n in numbers}

    numbers = warm_up._numbers_of_logprobs(most)
    assert max(numbers) <= most and len(numbers) <= 40
    assert variants(numbers) == variants(range(most + 1))


def test_kernels_for_logprobs_are_compiled_ahead_and_then_called(monkeypatch):
    """vLLM's kernels are compiled ahead only if their module is named."""
    called, within = [], []

    @contextlib.contextmanager
    def precompile(*modules):
        within.extend(modules)
        yield
        within.clear()

    monkeypatch.setattr(warm_up, "precompile", precompile)
    monkeypatch.setattr(
        logprob, "compute_topk_scores", lambda logits, number, _: called.append((*within, logits.dtype, number))
    )
    config = SimpleNamespace(dtype=torch.bfloat16, max_logprobs=5, get_vocab_size=lambda: 32)
    warm_up._scores(SimpleNamespace(model_config=config, device=torch.device("cpu")))
    each = [(dtype, number) for dtype in (torch.bfloat16, torch.float32) for number in warm_up._numbers_of_logprobs(5)]
    module = logprob.compute_token_logprobs.__module__
    assert sorted(called, key=str) == sorted([*each, *((module, *one) for one in each)], key=str)
