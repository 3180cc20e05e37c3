"""Graphs of the emulated NPU, which replays captured calls on the same memory: kernels, and decode steps."""

import sys
from contextlib import contextmanager
from unittest.mock import patch

import asking
import emulated_npu
import pytest
import torch
from conftest import TESTS
from engines import is_first_runner, report
from processes import run

DECODE = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 4, 8]}
CAPTURES = {"max_num_seqs": 8, "compilation_config": DECODE}  # six prompts are padded to eight


@pytest.fixture(params=["first runner", "second runner"])
def captures(request, engine, monkeypatch):
    """An engine that captures decode steps, for each of vLLM's model runners. vLLM chooses the second one itself."""
    is_first = request.param == "first runner"
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if is_first:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")

    @contextmanager
    def capturing(path, **arguments):
        with engine(path, **CAPTURES | arguments) as llm:
            assert is_first_runner(llm) == is_first
            yield llm

    return capturing


@pytest.fixture
def replays():
    """The number of requests in each replayed graph, in the order of the replays."""
    from vllm_opset.platform.npu import graphs

    seen, new_lengths = [], graphs.new_lengths

    def noted(seq_lens):
        seen.append(len(seq_lens))
        return new_lengths(seq_lens)

    with patch.object(graphs, "new_lengths", noted):
        yield seen


@pytest.mark.parametrize(
    ("name", "kernel", "operator"),
    [
        ("qwen3", "ascend", "npu::npu_fused_infer_attention_score"),
        ("qwen3", "ascend_atb", "atb::_npu_paged_attention"),
        ("mistral", "ascend", "npu::npu_fused_infer_attention_score"),
        ("gemma3", "ascend", "npu::npu_fused_infer_attention_score"),  # two groups of layers, with tables of their own
    ],
)
def test_greedy_tokens_equal_those_of_transformers(name, kernel, operator, captures, relaxed, replays, tmp_path):
    reference = asking.build(name, tmp_path)
    overrides = {"opset": {"kernels": {"paged_attention": kernel}}}
    with captures(tmp_path, additional_config=overrides) as llm:
        before, python_calls = relaxed[operator], calls(llm)
        assert asking.tokens(llm, asking.prompts()) == asking.expected(reference, asking.prompts())
        assert asking.tokens(llm, asking.prompts()[:1]) == asking.expected(reference, asking.prompts()[:1])
        layers = llm.llm_engine.model_config.hf_config.num_hidden_layers
        assert set(replays) == {1, 8} and len(replays) >= 2 * (asking.NUM_TOKENS - 2)
        # The operator ran for each replay; the Python kernel ran only for prompts.
        assert relaxed[operator] - before >= len(replays) * layers
        assert calls(llm) - python_calls < len(replays) * layers


def calls(llm) -> int:
    return sum(row["calls"] for row in report(llm) if row["op"] == "paged_attention")


def test_kernels_are_replayed_as_the_hardware_command_asks(strict, monkeypatch):
    monkeypatch.syspath_prepend(TESTS / "ascend_hardware")
    import graphs

    assert {case: reason for case in graphs.cases() if (reason := graphs.why_not(case))} == {}


def test_tokens_are_the_same_with_graphs_as_the_hardware_command_asks():
    finished = run(sys.executable, TESTS / "ascend_hardware" / "decode.py", **emulated_npu.variables())
    assert finished.code == 0 and finished.out.splitlines()[-1] == "null", finished.output


def test_what_is_captured_is_not_done_before_it_is_replayed():
    x, graph = torch.ones(3, device="npu"), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        x[1:] += 2 * x[:2]
    assert x.tolist() == [1, 1, 1]
    for expected in ([1, 3, 3], [1, 5, 9]):
        graph.replay()
        assert x.tolist() == expected


def test_what_reads_from_the_npu_cannot_be_captured():
    x = torch.ones(3, device="npu")
    for read in (lambda: x[0].item(), lambda: x.cpu(), x.nonzero):
        with pytest.raises(RuntimeError, match="cannot be captured"), torch.npu.graph(torch.npu.NPUGraph()):
            read()


def test_without_the_new_lengths_tokens_are_others(captures, relaxed, tmp_path):
    from vllm_opset.platform.npu import graphs

    reference = asking.build("qwen3", tmp_path)
    new_lengths = graphs.new_lengths

    def of_the_capture(seq_lens):
        return new_lengths([1] * len(seq_lens))

    with captures(tmp_path) as llm, patch.object(graphs, "new_lengths", of_the_capture):
        assert asking.tokens(llm, asking.prompts()) != asking.expected(reference, asking.prompts())


def test_a_graph_that_is_never_updated_would_wait_for_ever(captures, relaxed, tmp_path):
    from vllm_opset.platform.npu import graphs

    asking.build("qwen3", tmp_path)
    with (
        captures(tmp_path) as llm,
        patch.object(graphs.DecodeGraph, "update", lambda *_, **__: None),
        pytest.raises(RuntimeError, match="waits for an event that nobody has recorded"),
    ):
        asking.tokens(llm, asking.prompts())


def test_a_step_without_requests_is_replayed_too(captures, relaxed, replays, tmp_path):
    asking.build("qwen3", tmp_path)
    with captures(tmp_path) as llm:
        asking.tokens(llm, [prompt[:8] for prompt in asking.prompts()])  # in one step, so that all end in one step
        assert replays[-1] == 8
        llm.collective_rpc("execute_dummy_batch")
    assert replays[-1] == 1


def test_a_reference_that_would_be_captured_is_refused(captures, relaxed, tmp_path):
    asking.build("gemma2", tmp_path)
    said = "reference of paged_attention cannot be captured in a graph"
    with pytest.raises(Exception, match=said), captures(tmp_path):
        pass
