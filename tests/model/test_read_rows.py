"""The rows of a step that vLLM reads."""

from types import SimpleNamespace

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import override_forward_context

from vllm_opset.model import last_layer
from vllm_opset.model.last_layer import ReadRows

LAYER = "model.layers.1.self_attn.attn"


def step(graph=CUDAGraphMode.NONE, query_start_loc=(0, 5, 6, 12)) -> SimpleNamespace:
    batch = SimpleNamespace(query_start_loc=torch.tensor(query_start_loc, dtype=torch.int32))
    return SimpleNamespace(attn_metadata={LAYER: SimpleNamespace(batch=batch)}, cudagraph_runtime_mode=graph)


def test_they_are_the_last_of_each_request():
    with override_forward_context(step()):
        rows = ReadRows().of_step(LAYER, 12)
    assert rows.dtype is torch.int64 and rows.tolist() == [4, 5, 11]


def test_padding_of_a_batch_names_a_row_of_the_step():
    with override_forward_context(step(query_start_loc=(0, 0, 12, 12))):
        assert ReadRows().of_step(LAYER, 12).tolist() == [0, 11, 11]


@pytest.mark.parametrize(
    ("context", "num_tokens"),
    [
        (None, 12),
        (SimpleNamespace(attn_metadata=None), 12),  # a profile
        (step(CUDAGraphMode.FULL), 12),
        (step(CUDAGraphMode.PIECEWISE), 12),
        (step(query_start_loc=range(7)), 6),  # a decode step
    ],
)
def test_all_rows_are_computed(context, num_tokens):
    with override_forward_context(context):
        assert ReadRows().of_step(LAYER, num_tokens) is None


def test_requests_with_logprobs_of_their_prompt_are_known_until_they_end():
    def new(name: str, prompt_logprobs: int | None) -> SimpleNamespace:
        return SimpleNamespace(req_id=name, sampling_params=SimpleNamespace(prompt_logprobs=prompt_logprobs))

    read = ReadRows()
    pooled = SimpleNamespace(req_id="pooled", sampling_params=None)
    requests = [new("scored", 0), new("other", None), pooled]
    read.before_step(SimpleNamespace(scheduled_new_reqs=requests, finished_req_ids=set()))
    read.before_step(SimpleNamespace(scheduled_new_reqs=[], finished_req_ids={"other"}))
    with override_forward_context(step()):
        assert read.of_step(LAYER, 12) is None
    # The name may come again in the step that ends it.
    again = [new("scored", 1)]
    read.before_step(SimpleNamespace(scheduled_new_reqs=again, finished_req_ids={"scored"}))
    assert read.requests == {"scored"}
    read.before_step(SimpleNamespace(scheduled_new_reqs=[], finished_req_ids={"scored"}))
    assert not read.requests


def test_a_step_without_a_residual_does_not_take_the_rows_of_an_earlier_step():
    def norm(x, residual=None):
        return x if residual is None else (x, residual)

    forwards = (norm, lambda x: x, norm)
    ends = last_layer.Ends(*(SimpleNamespace(forward=forward) for forward in forwards))
    last_layer._leave_out(ends, lambda num_tokens: torch.tensor([1]))
    x = torch.ones(3, 2)
    ends.begin.forward(x, x)
    assert len(ends.projection.forward(x)) == 1
    ends.begin.forward(x)
    assert len(ends.projection.forward(x)) == 3
    assert torch.equal(ends.end.forward(x), x)
