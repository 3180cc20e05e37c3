"""Kernels are called before an engine is ready, so that a failing kernel fails no request."""

import models
import pytest
import torch
from engines import generate

from vllm_opset import kernel as registry
from vllm_opset import ops, selection
from vllm_opset.model import warm_up

pytestmark = [
    pytest.mark.engine,
    pytest.mark.window,
    pytest.mark.skipif(torch.cuda.is_available(), reason="of the platform for a CPU: runs where there is no GPU"),
]


def called() -> set[tuple[str, str]]:
    return {(choice.op, str(choice.problem)) for choice in selection.choices() if choice.calls}


def test_what_requests_call_was_called_before(engine, tmp_path, monkeypatch):
    """Warm-up calls every kernel that requests call, and the counters count requests alone."""
    models.build("qwen3", tmp_path)
    before, forget_calls = set(), warm_up.forget_calls
    monkeypatch.setattr(warm_up, "forget_calls", lambda: (before.update(called()), forget_calls()))
    with engine(tmp_path) as llm:
        assert before and not called()
        generate(llm, models.prompts())
        generate(llm, models.prompts(), temperature=1, top_k=5, top_p=0.9, seed=1, repetition_penalty=1.5)
        assert called() and called() <= before  # the parts of fused layers were called when fusing was tried out


def test_a_kernel_that_fails_ends_the_start(engine, tmp_path, monkeypatch):
    def silu_and_mul(x):
        raise NotImplementedError("not for this width")

    monkeypatch.setattr(registry, "_registry", {op: dict(known) for op, known in registry._registry.items()})
    registry.kernel(ops.silu_and_mul, name="failing")(silu_and_mul)
    models.build("qwen3", tmp_path)
    config = {"opset": {"kernels": {"silu_and_mul": "failing"}}}
    with (
        pytest.raises(NotImplementedError, match="not for this width") as failure,
        engine(tmp_path, additional_config=config),
    ):
        pytest.fail("the engine has started")
    assert "vllm-opset: silu_and_mul=failing of test_first_step raised this" in failure.value.__notes__[0]
