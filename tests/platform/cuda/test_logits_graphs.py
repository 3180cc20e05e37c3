"""Graphs of the LM head, on a CPU: a graph is replaced by one that computes the same again when it is replayed."""

import contextlib
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from vllm_opset.platform import second_runner

pytestmark = [
    pytest.mark.window,
    pytest.mark.skipif(
        not second_runner.sample_by.bridge.needed(),
        reason="opset captures nothing more up to vLLM 0.30: ends when 0.31 is the oldest supported release",
    ),
]

COLUMNS, VOCABULARY, CAPTURED_ROWS = 8, 32, 48


class Graph:
    """Stands for a CUDA graph. calls: what was called while it was captured."""

    capturing: "Graph | None" = None

    def __init__(self) -> None:
        self.calls, self.replays = [], 0

    @torch.inference_mode()  # as vLLM draws
    def replay(self) -> None:
        self.replays += 1
        for call in self.calls:
            call()


class Stream:
    """Stands for a stream, on which the kernel ran before it is captured."""

    def __init__(self) -> None:
        self.was_used = self.waited = False

    def wait_stream(self, other: object) -> None:
        self.waited = True


@contextlib.contextmanager
def using(stream: Stream):
    assert stream.waited
    stream.was_used = True
    yield


@contextlib.contextmanager
def capturing(graph: Graph, pool: object, stream: Stream):
    assert pool == "vLLM's pool" and stream.was_used
    Graph.capturing = graph
    yield
    Graph.capturing = None


class Model(torch.nn.Module):
    """A model whose LM head is a matrix."""

    def __init__(self, processor: type) -> None:
        super().__init__()
        self.lm_head = torch.randn(VOCABULARY, COLUMNS, generator=torch.Generator().manual_seed(1))
        self.logits_processor = processor.__new__(processor)
        torch.nn.Module.__init__(self.logits_processor)
        self.logits_processor.forward, self.logits_processor.head_dtype = self.multiply, None

    def multiply(self, head: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        out = rows @ head.T
        if Graph.capturing:
            Graph.capturing.calls.append(lambda: out.copy_(rows @ head.T))
        return out

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.logits_processor(self.lm_head, hidden_states)


class Masking(Model):
    """A model that does more than to multiply."""

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = self.logits_processor(self.lm_head, hidden_states)
        logits[:, torch.tensor([3])] = -torch.inf
        return logits


@pytest.fixture
def worker(monkeypatch):
    """`worker(**changes)`: the attributes of a worker that are read, as after vLLM has captured its graphs."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    from vllm_opset.model.sampler import OpsetSampler

    class Sampler(OpsetSampler):
        """Gives the logits that it was given."""

        def __init__(self) -> None:
            pass

        def __call__(self, logits: torch.Tensor, batch) -> SimpleNamespace:
            return SimpleNamespace(logits=logits, num_sampled="sampled", num_rejected="rejected")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", using)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr("vllm_opset.platform.cuda.logits_graphs.OpsetSampler", Sampler)

    def worker(model: type = Model, sampler: object = None, **changes) -> SimpleNamespace:
        hidden_states = torch.zeros(CAPTURED_ROWS, COLUMNS)
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(world_size_across_dp=changes.pop("world_size", 1)),
            speculative_config=changes.pop("drafts", None),
            lora_config=changes.pop("adapters", None),
            model_config=SimpleNamespace(enable_sleep_mode=changes.pop("sleep_mode", False)),
        )
        runner = SimpleNamespace(
            model=model(changes.pop("processor", LogitsProcessor)),
            sampler=sampler or Sampler(),
            sample=lambda *given: given,
            max_num_reqs=256,
            dtype=torch.bfloat16,
            model_state=SimpleNamespace(num_new_sampled_tokens_per_step=changes.pop("new_tokens", 1)),
            cudagraph_manager=SimpleNamespace(hidden_states=hidden_states, pool="vLLM's pool"),
        )
        vars(runner).update(changes)
        return SimpleNamespace(vllm_config=config, model_runner=runner)

    return worker


@pytest.fixture
def runner(worker):
    """A runner with graphs."""
    from vllm_opset.platform.cuda import logits_graphs

    one = worker()
    logits_graphs.capture(one)
    return one.model_runner


def batch(num_reqs: int, num_tokens: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(num_reqs=num_reqs, num_tokens=num_tokens or num_reqs)


def step(runner, number: int, rows: int) -> torch.Tensor:
    """The output of the model's graph with so many rows, in a step of this number."""
    runner.cudagraph_manager.hidden_states.normal_(generator=torch.Generator().manual_seed(number))
    return runner.cudagraph_manager.hidden_states[:rows]


@pytest.mark.parametrize(("num_reqs", "rows"), [(1, 1), (3, 4), (5, 8), (33, 40), (48, 48)])
def test_each_request_gets_the_logits_of_its_row_in_every_step(num_reqs, rows, runner):
    for number in range(3):
        hidden_states = step(runner, number, rows)
        output, *counts = runner.sample(hidden_states, batch(num_reqs), None)
        expected = hidden_states[:num_reqs] @ runner.model.lm_head.T
        torch.testing.assert_close(output.logits, expected)
        assert counts == ["sampled", "rejected"]


def test_the_graph_is_replayed_once_a_step(runner):
    graphs = runner.sample.__self__
    for num_reqs, expected in ((1, 1), (3, 4), (4, 4), (5, 8), (48, 48)):
        before = {size: graph.replays for size, (graph, _) in graphs._captured.items()}
        runner.sample(step(runner, 1, num_reqs), batch(num_reqs), None)
        after = {size: graph.replays for size, (graph, _) in graphs._captured.items()}
        assert after == before | {expected: before[expected] + 1}


@pytest.mark.parametrize("case", ["structured", "a prompt", "no graph was replayed", "more requests"])
def test_all_other_steps_take_vllms_way(case, runner):
    hidden_states = step(runner, 1, 4)
    given = {
        "structured": (hidden_states, batch(3), "a bitmask"),
        "a prompt": (hidden_states, batch(3, num_tokens=4), None),
        "no graph was replayed": (hidden_states.clone(), batch(3), None),
        "more requests": (step(runner, 1, CAPTURED_ROWS), batch(CAPTURED_ROWS + 1), None),
    }[case]
    assert runner.sample(*given) is not None
    assert all(found is one for found, one in zip(runner.sample(*given), given, strict=True))


def test_graphs_share_a_bound_on_their_rows(worker):
    from vllm_opset.platform.cuda import logits_graphs

    large = worker(max_num_reqs=1024)
    large.model_runner.cudagraph_manager.hidden_states = torch.zeros(512, COLUMNS)
    for one, sizes in ((large, [1, 2, 4, 8, 16, 32, 64, 128]), (worker(max_num_reqs=6), [1, 2, 4, 6])):
        logits_graphs.capture(one)
        assert one.model_runner.sample.__self__._sizes == sizes


@pytest.mark.parametrize(
    "changes",
    [
        {"world_size": 2},
        {"drafts": "n-grams"},
        {"adapters": "two"},
        {"sleep_mode": True},
        {"new_tokens": 4},
        {"model": Masking},
        {"sampler": "vLLM's own"},
        {"cudagraph_manager": None},
        {"cudagraph_manager": SimpleNamespace(hidden_states=None)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_nothing_is_captured_with(changes, worker):
    from vllm_opset.platform.cuda import logits_graphs

    one = worker(**changes)
    before = one.model_runner.sample
    logits_graphs.capture(one)
    assert one.model_runner.sample is before


def test_nothing_is_captured_for_a_derived_layer(worker):
    """Adapters put such a layer in the place of vLLM's own, and a model may derive one."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    from vllm_opset.platform.cuda import logits_graphs

    class Derived(LogitsProcessor):
        pass

    one = worker(processor=Derived)
    logits_graphs.capture(one)
    assert not hasattr(one.model_runner.sample, "__self__")


@pytest.mark.parametrize(
    ("head_dtype", "on_vllms_own", "captured"),
    [
        (torch.bfloat16, False, True),
        (torch.float32, True, True),
        (torch.float32, False, False),
        (torch.float16, True, False),
    ],
    ids=str,
)
def test_a_head_in_another_dtype_is_not_copied_into_a_graph(head_dtype, on_vllms_own, captured, worker, monkeypatch):
    """In fp32, vLLM multiplies without a copy of the head on its own platform."""
    from vllm.platforms import current_platform

    from vllm_opset.platform.cuda import logits_graphs

    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: on_vllms_own)
    one = worker()
    one.model_runner.model.logits_processor.head_dtype = head_dtype
    logits_graphs.capture(one)
    assert hasattr(one.model_runner.sample, "__self__") is captured


def test_a_quantised_head_is_not_captured(worker):
    """vLLM's kernels for such weights need memory for the stream of the capture, and vLLM allows no more by then."""
    from vllm_opset.platform.cuda import logits_graphs

    one = worker()
    one.model_runner.model.lm_head.quant_method = object()
    logits_graphs.capture(one)
    assert not hasattr(one.model_runner.sample, "__self__")


def test_no_graph_outlives_the_worker(worker):
    """vLLM keeps the runner that it has ended. A graph in its pool would keep all of the pool."""
    from vllm_opset.platform.cuda import logits_graphs

    one = worker()
    logits_graphs.capture(one)
    graphs = weakref.ref(one.model_runner.sample.__self__)
    logits_graphs.drop(one)
    gc.collect()
    assert graphs() is None
    logits_graphs.drop(SimpleNamespace(model_runner=None))
    logits_graphs.drop(SimpleNamespace())


@pytest.mark.parametrize("name", ["llama.LlamaForCausalLM", "qwen3.Qwen3ForCausalLM", "gemma2.Gemma2ForCausalLM"])
def test_vllms_models_multiply_and_no_more(name):
    import inspect

    from vllm_opset.platform.bridges import find
    from vllm_opset.platform.cuda import logits_graphs

    compute_logits = find(f"vllm.model_executor.models.{name}").compute_logits
    assert logits_graphs.ALLOWED_ATTRIBUTES.issuperset(inspect.unwrap(compute_logits).__code__.co_names)


def test_vllm_calls_the_method_as_it_is_replaced():
    """The graphs take vLLM's arguments by their order, and give what vLLM's method gives."""
    import inspect

    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from vllm_opset.platform.cuda.logits_graphs import LogitsGraphs

    assert [*inspect.signature(GPUModelRunner.sample).parameters] == [
        *inspect.signature(LogitsGraphs.sample).parameters
    ]
    source = inspect.getsource(GPUModelRunner.sample)
    assert "sampler_output = self.sampler(logits, input_batch)" in source
    assert "return sampler_output, sampler_output.num_sampled, sampler_output.num_rejected" in source
