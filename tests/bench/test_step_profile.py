"""benchmarks/step_profile.py: what it makes of kernels and calls, and an engine on a CPU, whose GPU is idle."""

import json
import random
import runpy
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import typer
from readme import ROOT
from vllm import envs

SCRIPT = runpy.run_path(str(ROOT / "benchmarks" / "step_profile.py"), run_name="step_profile")
Span = SCRIPT["Span"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("attend_prefill_sm90", "attention"),
        ("void flash::FlashAttnFwdSm90", "attention"),
        ("nvjet_sm90_tst_128x256", "products"),
        ("topkGatingSoftmax", "experts"),
        ("_topk_topp_kernel", "sampler"),
        ("reread", "sampler"),
        ("decode_sm90", "products"),
        ("int4_experts_decode_sm90", "experts"),
        ("fused_add_rms_norm", "norms and activations"),
        ("Memcpy DtoH", "copies"),
        ("_gated", "norms and activations"),
        ("_quantise", "norms and activations"),
        ("elementwise_kernel", "others"),
    ],
)
def test_the_kind_of_a_kernel(name, kind):
    assert SCRIPT["kind_of"](name) == kind


def test_time_in_which_two_kernels_run_counts_once():
    spans = [Span("a", 0, 10), Span("b", 5, 12), Span("c", 6, 7), Span("d", 20, 21)]
    assert SCRIPT["busy"](spans) == 13
    assert SCRIPT["busy"]([]) == 0


def test_figures_of_kernels_and_calls():
    """The first product starts while attention runs, and waits for it."""
    kernels = [Span("attend_decode", 1000, 3000), Span("nvjet", 2000, 5000), Span("nvjet", 7000, 8000)]
    calls = [
        Span("cudaGraphLaunch", 0, 500),
        Span("cuLaunchKernelEx", 600, 700),
        Span("cudaLaunchKernel", 800, 900),
        Span("cudaMemcpyAsync", 1000, 1100),
        Span("cudaEventSynchronize", 2000, 8000),
    ]
    figures = SCRIPT["describe"](kernels, calls)
    expected = {
        "GPU busy, ms": 5.0,
        "GPU: attention, ms": 2.0,
        "GPU: products, ms": 3.0,
        "GPU: sampler, ms": 0.0,
        "GPU idle between kernels, ms": 2.0,
        "host: launches of kernels": 2,
        "host: launches of graphs": 1,
        "host: copies": 1,
        "host: waits, ms": 6.0,
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)


class Engine:
    """Gives a token in each step to the first `room` of its requests that have not had all of theirs."""

    def __init__(self, room: int) -> None:
        self.room, self.left = room, {}

    def add_request(self, request_id: str, prompt: dict, params) -> None:
        self.left[request_id] = params.max_tokens

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[SimpleNamespace]:
        given = [*self.left][: self.room]
        self.left = {name: left - (name in given) for name, left in self.left.items()}
        outputs = [SimpleNamespace(request_id=name, finished=not self.left[name]) for name in given]
        self.left = {name: left for name, left in self.left.items() if left}
        return outputs


@pytest.mark.parametrize(
    ("room", "prompt", "most"),
    [(4, 20, None), (3, 0, None), (3, 20, "of 4 requests, at most 3"), (2, 0, "of 3 requests, at most 2")],
)
def test_requests_that_no_step_computes_together_are_refused(room, prompt, most):
    """vLLM queues those that are more than its max_num_seqs."""
    steps = SCRIPT["Steps"].__new__(SCRIPT["Steps"])
    steps.engine, steps.decoding, steps.prompt, steps.sampling = Engine(room), 3, prompt, {}
    steps.vocab_size, steps.draw, steps.count = 100, random.Random(0), 0
    with nullcontext() if most is None else pytest.raises(typer.BadParameter, match=most):
        assert steps.measure(nullcontext) >= 0 and not steps.engine.left


@pytest.mark.engine
def test_steps_of_an_engine_are_timed(tmp_path, monkeypatch):
    monkeypatch.setenv("OPSET_PLATFORM", "cpu")
    arguments = json.dumps({"kv_cache_memory_bytes": 64 << 20})
    try:
        SCRIPT["main"]("tiny", 3, 20, True, 2, arguments, tmp_path / "figures.json")
    finally:
        envs.disable_envs_cache()  # an engine in this process fills it, and later tests set variables
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["a step, ms"] > 0
    assert figures["GPU busy, ms"] == figures["host: launches of kernels"] == 0
