"""Stock vLLM on a GPU with opset's parts off and on. Each engine has a process of its own."""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from vllm_opset.bench.compare import CACHES
from vllm_opset.platform import second_runner

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("vllm._C_stable_libtorch") is None,
    reason="needs an NVIDIA GPU and stock vLLM: runs on one",
)

# In bf16 this model's log-probabilities have errors of up to 0.08; a prompt with other tokens changes them by 3.
CLOSE = 0.25

# The value of OPSET_NATIVE, or "stock" for vLLM without the plugin's platform.
STOCK = "stock"
OFF = "attention=off,sampler=off,linear=off,ops=off,moe=off"
NAMED = "sampler=off,linear=off,ops=off"  # attention by --attention-backend
SAMPLER = "attention=off,sampler=on,linear=off,ops=off"
COMPILED_PARTS = "attention=on,sampler=on,linear=on,ops=off"  # the default on GPUs where they are faster
ALL = "attention=on,sampler=on,linear=on,ops=on"
ATTENTION = "attention=on,sampler=off,linear=off,ops=off,moe=off"
EXPERTS = "attention=off,sampler=off,linear=off,ops=off,moe=on"
# vLLM's model runners, by the value of VLLM_USE_V2_MODEL_RUNNER: this process may have it set for other platforms.
FIRST, SECOND = "0", "1"

# On a busy GPU, choices that Inductor makes by timing may differ: which operations it combines in one kernel, and block
# sizes. Products and sums may then become one operation or two. A variable below makes reductions the same.
BY_TIMING = ("combo_kernels", "benchmark_combo_kernel", "triton.autotune_pointwise")
COMPILED = {"compilation_config": {"inductor_compile_config": dict.fromkeys(BY_TIMING, False)}}
EAGER = {"enforce_eager": True}

# Arguments of both engines. vLLM's default for prompts of linear attention is FlashInfer's kernel, installed or not.
OF_KIND = {"hybrid": {"gdn_prefill_backend": "triton"}}

# The number of engines that are up at a time. Each takes a minute or two of one core's work.
AT_ONCE = 8
# Compiled engines of each kind that are started until two are equal. On a busy GPU, engines with the second model
# runner differed in a few rounded results, in one of two runs. Such an engine has differed from itself, too. A change
# by the plugin would show in all of them.
ENGINES = 3


@pytest.fixture(scope="module")
def answers() -> Iterator[Callable[..., dict]]:
    """`answers(native, runner, eager, number)`: the answers of an engine, or of another engine of the same kind.

    The first engine of each kind is asked, whichever tests run.
    """
    kinds = [
        *itertools.product((STOCK, OFF), (FIRST, SECOND), (False, True)),
        *itertools.product((NAMED, SAMPLER, COMPILED_PARTS, ALL), (FIRST, SECOND), (False,)),
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = {(*kind, 0): pool.submit(ask, *kind) for kind in kinds}

        def answers(native: str, runner: str = SECOND, eager: bool = False, number: int = 0) -> dict:
            engine = native, runner, eager, number
            if engine not in asked:
                asked[engine] = pool.submit(ask, native, runner, eager)
            return asked[engine].result()

        yield answers
        pool.shutdown(cancel_futures=True)


def ask(native: str, runner: str, eager: bool, kind: str = "dense") -> dict:
    arguments = {"kind": kind, **(EAGER if eager else COMPILED), **OF_KIND.get(kind, {})}
    if (native, kind) == (STOCK, "ALiBi"):
        arguments["attention_config"] = {"backend": "TRITON_ATTN"}  # FlashAttention 2, its default, may be left out
    if native == NAMED:
        arguments = {**arguments, "attention_config": {"backend": "CUSTOM"}}
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            "VLLM_USE_V2_MODEL_RUNNER": runner,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "TORCHINDUCTOR_DETERMINISTIC": "1",
            # Stock vLLM would first compile FlashInfer's sampler for minutes, or fail where that is not installed.
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            # Cached code may round differently from freshly compiled code. The answers of one engine did differ in this
            # way.
            **{name: f"{folder}/{name}" for name in CACHES},
            **({"OPSET_PLATFORM": "off"} if native == STOCK else {"OPSET_PLATFORM": "native", "OPSET_NATIVE": native}),
        }
        script = Path(__file__).with_name("native_engine.py")
        process = subprocess.run(
            [sys.executable, script, json.dumps(arguments)],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert process.returncode == 0, f"{native}, runner {runner}, eager {eager}: {process.stderr[-5000:]}"
    return json.loads(process.stdout.splitlines()[-1])


def tokens(found: list[dict]) -> list[list[int]]:
    return [request["tokens"] for request in found]


def differences(found: dict, expected: dict) -> list[str]:
    """For answers that should be equal bit for bit: where the answers to a prompt first differ."""
    first = []
    for asked in (name for name, value in found.items() if isinstance(value, list)):
        for index, (mine, theirs) in enumerate(zip(found[asked], expected[asked], strict=True)):
            steps = enumerate(zip(*mine.values(), strict=True)), zip(*theirs.values(), strict=True)
            others = [(step, one, other) for (step, one), other in zip(*steps, strict=True) if one != other]
            first += [f"{asked}, prompt {index}, step {step}: {one}, not {other}" for step, one, other in others[:1]]
    return sorted(first)


def assert_close(found: dict, expected: dict) -> None:
    """Compares the log-probabilities of each request's first token; later ones depend on the drawn tokens."""
    for one, other in zip(found["greedy"], expected["greedy"], strict=True):
        mine, theirs = one["logprobs"][0], other["logprobs"][0]
        common = mine.keys() & theirs.keys()
        assert common and all(abs(mine[token] - theirs[token]) < CLOSE for token in common)


@pytest.mark.parametrize(("eager", "most"), [(False, ENGINES), (True, 1)], ids=["compiled", "eager"])
@pytest.mark.parametrize("runner", [FIRST, SECOND])
def test_with_everything_off_it_is_stock_vllm_bit_for_bit(runner, eager, most, answers):
    off, stock = [], []
    for number in range(most):
        off.append(answers(OFF, runner, eager, number))
        stock.append(answers(STOCK, runner, eager, number))
        if any(one == other for one in off for other in stock):
            break
        found = differences(off[-1], stock[-1])
        warnings.warn(f"engines differ, of {number + 1} each: {found}", stacklevel=1)
    else:
        pytest.fail(f"everything off differs from stock vLLM, in all of {most} engines each: {found}")


@pytest.mark.parametrize("runner", [FIRST, SECOND])
def test_opsets_attention_answers_where_users_name_it(runner, answers):
    found = answers(NAMED, runner)
    assert found["kernels"] == {"reshape_and_cache": "triton", "paged_attention": "triton"}
    assert_close(found, answers(STOCK, runner))


@pytest.mark.parametrize(
    ("runner", "kernels"), [(FIRST, {"top_k_top_p_sample", "apply_penalties"}), (SECOND, {"top_k_top_p_sample"})]
)
def test_the_sampler_leaves_greedy_requests_as_they_are(runner, kernels, answers):
    """Compares tokens. Log-probabilities differed by up to 0.0003, on a busy GPU."""
    found, stock = answers(SAMPLER, runner), answers(STOCK, runner)
    assert found["kernels"] == dict.fromkeys(kernels, "triton")
    assert tokens(found["greedy"]) == tokens(stock["greedy"])
    assert_close(found, stock)


@pytest.mark.parametrize("runner", [FIRST, SECOND])
def test_the_default_parts_answer_and_replay_longer_steps(runner, answers):
    found, stock = answers(COMPILED_PARTS, runner), answers(STOCK, runner)
    assert {"linear", "paged_attention", "top_k_top_p_sample"} <= found["kernels"].keys()
    assert set(found["kernels"].values()) == {"triton"}
    assert stock["longest captured step"] < found["longest captured step"] == found["longest step"]
    assert_close(found, stock)


@pytest.mark.parametrize("native", [SAMPLER, COMPILED_PARTS, ALL])
def test_seeded_requests_draw_the_same_tokens_in_any_batch(native, answers):
    found = answers(native)
    assert tokens(found["seeded"]) == tokens(found["reversed"]) == tokens(found["among greedy ones"])
    assert tokens(found["seeded"]) != tokens(found["greedy"])


@pytest.mark.parametrize("runner", [FIRST, SECOND])
def test_all_parts_together_answer(runner, answers):
    found = answers(ALL, runner)
    assert {"rms_norm", "fused_add_rms_norm", "silu_and_mul", "qk_norm_rope_cache"} <= found["kernels"].keys()
    assert set(found["kernels"].values()) == {"triton"}
    assert_close(found, answers(STOCK, runner))


def test_experts_answer():
    """With the model runner that vLLM 0.26 has for them."""
    with ThreadPoolExecutor(2) as pool:
        found, stock = pool.map(lambda native: ask(native, FIRST, False, "experts"), (EXPERTS, STOCK))
    assert found["kernels"] == {"route": "triton", "fused_experts": "triton"}
    assert_close(found, stock)


WITH_IMAGES = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="vLLM's multimodal models import it: runs where it is"
)


@pytest.mark.parametrize("kind", ["ALiBi", "sinks", "hybrid", pytest.param("multimodal", marks=WITH_IMAGES)])
def test_attention_answers_for_other_kinds_of_models(kind):
    with ThreadPoolExecutor(2) as pool:
        found, stock = pool.map(lambda native: ask(native, SECOND, False, kind), (ATTENTION, STOCK))
    assert found["kernels"] == {"reshape_and_cache": "triton", "paged_attention": "triton"}
    assert_close(found, stock)


@pytest.mark.skipif(
    not second_runner.draft_by.bridge.needed(), reason="this vLLM has no draft models: runs with 0.32 and later"
)
def test_a_captured_draft_model_drafts_the_tokens_of_its_target():
    with ThreadPoolExecutor(2) as pool:
        found, stock = pool.map(lambda native: ask(native, SECOND, False, "drafts"), (ATTENTION, STOCK))
    assert_close(found, stock)
    # It is its own target, so greedy requests accept all but what rounding changes. Others draw their tokens. On an
    # H200, stock vLLM accepts 0.47 of the drafts of all.
    assert stock["accepted"] > 0.3
    assert found["accepted"] > 0.9 * stock["accepted"]
