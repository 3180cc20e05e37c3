"""Recorded calls compute the same as the code that made them, for new values of its inputs, or are refused."""

import pytest
import torch

from vllm_opset.kernel import kernels_of
from vllm_opset.platform.cpu.recording import recorded

pytestmark = [
    pytest.mark.window,
    pytest.mark.skipif("cpp" not in kernels_of("rms_norm"), reason="of C++ kernels: runs with g++ 12 or newer"),
]
ROWS, COLUMNS = 3, 32


def norm(x: torch.Tensor) -> torch.Tensor:
    return kernels_of("rms_norm")["cpp"].run(x, torch.linspace(0.5, 2, COLUMNS), 1e-6)


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, ::2].mul_(3).add_(x[:, 1::2])
    return y


def of_several_results(x: torch.Tensor) -> torch.Tensor:
    values, places = x.topk(4)
    return values * places


def views(x: torch.Tensor) -> torch.Tensor:
    left, right = x.split(COLUMNS // 2, 1)
    return norm(torch.cat((right, left.contiguous()), 1)).t().reshape(COLUMNS, ROWS)


def another_dtype(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(x.abs().long(), torch.arange(100.0)[:, None]).sum(-1).to(torch.bfloat16)


@pytest.mark.parametrize("function", [norm, in_place, of_several_results, views, another_dtype])
@torch.inference_mode()
def test_a_recording_computes_the_same_for_new_inputs(function):
    x = torch.randn(ROWS, COLUMNS)
    with recorded() as recording:
        result = function(x)
    assert recording.reason is None and recording.calls
    for _ in range(3):
        x.copy_(4 * torch.randn(ROWS, COLUMNS))
        held = [torch.randn(ROWS, COLUMNS) for _ in range(20)]  # takes memory that was not kept
        assert recording.replay()
        torch.testing.assert_close(result, function(x), rtol=0, atol=0)
        del held


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x.sum().item(),
        lambda x: x * x.tolist()[0][0],
        lambda x: x * float(x.numpy()[0, 0]),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x + torch.rand(ROWS, COLUMNS),
        lambda x: x if x.sum() > 0 else -x,
    ],
    ids=["item", "tolist", "numpy", "mask", "nonzero", "rand", "a condition"],
)
@torch.inference_mode()
def test_what_depends_on_values_is_refused(function):
    with recorded() as recording:
        function(torch.randn(ROWS, COLUMNS))
    assert recording.reason is not None


@torch.inference_mode()
def test_operators_of_other_libraries_are_refused():
    with torch.library._scoped_library("opset_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: 2 * x, "CPU")
        with recorded() as recording:
            torch.ops.opset_test.twice(torch.ones(2))
    assert "opset_test.twice" in recording.reason


@torch.inference_mode()
def test_a_replay_ends_at_a_call_that_finds_invalid_arguments():
    rotate = kernels_of("rotary_embedding")["cpp"].run
    positions, query, table = torch.tensor([1, 2]), torch.randn(2, 64), torch.randn(8, 16)
    with recorded() as recording:
        rotate(positions, query, None, 16, table, True)
        result = norm(query.view(4, 32))
    assert recording.replay()
    positions[1], before = 8, result.clone()
    assert not recording.replay()
    torch.testing.assert_close(result, before, rtol=0, atol=0)
    with pytest.raises(IndexError):
        rotate(positions, query, None, 16, table, True)
