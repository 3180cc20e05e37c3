"""Engine properties that need a GPU: graphs, the launches of a layer, and no compilation while serving."""

import functools
import importlib.util
import itertools
import json
import sys
from pathlib import Path

import engines
import models
import pytest
import torch
from engines import tokens
from processes import run

from vllm_opset.platform import second_runner

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: runs on one"),
]

NUM_TOKENS = 48
generate = functools.partial(engines.generate, max_tokens=NUM_TOKENS)
SETTINGS = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "compiled": {"compilation_config": {"mode": 3}},
    "compiled, with opset's layers": {"compilation_config": {"mode": 3, "custom_ops": ["all"]}},
    "graphs of decode alone": {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}},
    "piecewise graphs alone": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "chunks and preemption": {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 40},
}
# bf16 has 8 bits of mantissa, and these models spread their logits over some ten units. Compared with fp32, values
# change by a few hundredths, and by more where a sum of several layers is close to zero.
BF16_LOGPROBS = 0.25
# The bound for the same request in another batch: the matrix products use other tiles and other orders of sums.
BATCH_LOGPROBS = 0.1
WITHOUT_FIRST = Path(__file__).with_name("without_first_runner.py")
ON_STOCK = {"OPSET_NATIVE": "attention=on,sampler=on,linear=on,ops=on", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
STOCK = pytest.mark.skipif(
    importlib.util.find_spec("vllm._C_stable_libtorch") is None, reason="needs stock vLLM: runs where it is"
)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    return folder, models.build("qwen3", folder)


def chosen_logprobs(output) -> torch.Tensor:
    """The log-probabilities of the tokens of one answer."""
    answer = output.outputs[0]
    return torch.tensor([step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs, strict=True)])


@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_equal_those_of_transformers(setting, qwen, engine):
    folder, reference = qwen
    prompts = models.prompts()
    expected = [models.generate(reference, prompt, NUM_TOKENS)[0] for prompt in prompts]
    with engine(folder, **SETTINGS[setting]) as llm:
        assert tokens(generate(llm, prompts)) == expected


def test_prompts_are_replayed_as_piecewise_graphs(qwen, engine, monkeypatch):
    """Without a compiler, decode uses full graphs. In fp32, other steps use graphs that break at each attention."""
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture as Capture

    replay, breaks = Capture.replay, []
    monkeypatch.setattr(Capture, "replay", lambda self: breaks.append(self.num_eager_breaks) or replay(self))
    with engine(qwen[0]) as llm:
        breaks.clear()  # vLLM's second runner replays a step when it starts
        generate(llm, models.prompts()[1:2], max_tokens=4)
    # Some releases use this class for the full graphs of decode too.
    assert breaks[0] == qwen[1].config.num_hidden_layers and not any(breaks[1:])


def test_references_are_not_captured(qwen, engine):
    with (
        pytest.raises(Exception, match=r"reference of paged_attention cannot be captured .*--enforce-eager"),
        engine(qwen[0], additional_config={"opset": {"kernels": {"paged_attention": "reference"}}}),
    ):
        pass


@pytest.mark.parametrize("arguments", [{}, {"kv_cache_dtype": "fp8"}], ids=["bf16", "bf16, fp8 cache"])
def test_logprobs_in_bfloat16_are_near_those_in_fp32(arguments, qwen, engine):
    """Uses the reference's own answers as prompts, so that a different token does not end the comparison."""
    folder, reference = qwen
    answers = [prompt + models.generate(reference, prompt, NUM_TOKENS)[0] for prompt in models.prompts()]
    with engine(folder, dtype="bfloat16", **arguments) as llm:
        outputs = generate(llm, answers, max_tokens=1, prompt_logprobs=0)
    bound = BF16_LOGPROBS * (4 if arguments else 1)  # e4m3 keeps 4 bits of mantissa
    for answer, output in zip(answers, outputs, strict=True):
        with torch.inference_mode():
            logprobs = reference(torch.tensor([answer])).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(answer[1:])[:, None])[:, 0]
        got = torch.tensor(
            [step[token].logprob for token, step in zip(answer[1:], output.prompt_logprobs[1:], strict=True)]
        )
        assert (got - expected).abs().mean() < bound / 4
        assert (got - expected).abs().max() < bound * 4


def test_a_request_answers_in_a_batch_as_alone(qwen, engine):
    prompts = list(itertools.islice(itertools.cycle(models.prompts()), 32))
    with engine(qwen[0], dtype="bfloat16", enable_prefix_caching=False) as llm:
        together = generate(llm, prompts, logprobs=0)
        for prompt, output in list(zip(prompts, together, strict=True))[:: len(models.LENGTHS) + 1]:
            (alone,) = generate(llm, [prompt], logprobs=0)
            same = list(
                itertools.takewhile(
                    lambda pair: pair[0] == pair[1], zip(*(tokens([o])[0] for o in (alone, output)), strict=True)
                )
            )
            difference = chosen_logprobs(alone)[: len(same)] - chosen_logprobs(output)[: len(same)]
            assert len(same) > 0 and difference.abs().max() < BATCH_LOGPROBS


def test_nothing_is_compiled_while_serving(qwen, engine):
    import triton

    compiled = []
    # Covers steps that take the last few tokens of a prompt, and block tables whose row length is not a multiple of 16.
    unusual = {"max_num_batched_tokens": 64, "max_model_len": 384}
    with engine(qwen[0], dtype="bfloat16", **unusual) as llm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **info: compiled.append(info["repr"]))
        generate(llm, models.prompts() * 5, max_tokens=4)
        generate(llm, models.prompts()[:1], max_tokens=40)
        generate(llm, models.prompts(), max_tokens=4, temperature=1, top_k=5, top_p=0.9, min_p=0.1, seed=1, logprobs=2)
        generate(llm, models.prompts(), max_tokens=4, repetition_penalty=1.2, presence_penalty=0.5)
    assert not compiled


def kinds(events) -> list[str]:
    """Kernels in the order they ran: ours by name, and all launches of one matrix product as one "gemm"."""
    ours = ("_rope_cache", "attend_decode", "_fused_add_rms_norm", "_gated", "_linear")
    gemms = ("nvjet", "gemm", "cutlass", "splitK", "gemv")
    names = []
    for event in sorted(events, key=lambda event: event.time_range.start):
        kind = event.name if event.name in ours else "gemm" if any(g in event.name for g in gemms) else "other"
        if kind != "gemm" or names[-1:] != ["gemm"]:
            names.append(kind)
    return names


def test_a_layer_launches_what_it_should_and_nothing_else(qwen, engine):
    """Checks the launches between the attentions of two layers in a decode step."""
    from torch.profiler import ProfilerActivity, profile

    with engine(qwen[0], dtype="bfloat16", enforce_eager=True) as llm:
        generate(llm, models.prompts()[1:2], max_tokens=4)
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
            generate(llm, models.prompts()[1:2], max_tokens=8)
    ran = kinds(event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    attentions = [i for i, kind in enumerate(ran) if kind == "attend_decode"]
    parts = ["_fused_add_rms_norm", "_gated", "_fused_add_rms_norm", "_rope_cache"]
    layer = [name for part in parts for name in ("_linear", part)]
    between = [ran[a + 1 : b] for a, b in itertools.pairwise(attentions)]
    assert between.count(layer) >= 2 * 6, between[:6]  # of three layers, two follow another; there are some eight steps


@pytest.mark.skipif(
    not second_runner.replaces_triton_kernels(), reason="older releases keep the first runner: runs with 0.31 and later"
)
@pytest.mark.parametrize("platform", ["cuda", pytest.param("native", marks=STOCK)])
def test_the_second_runner_serves_without_the_first_one(platform, qwen):
    """The day that vLLM removes its first model runner, `platform/v1` can go, and nothing breaks on a GPU.

    The same holds for vLLM's IR.
    """
    folder, _ = qwen
    program = run(sys.executable, WITHOUT_FIRST, folder, OPSET_PLATFORM=platform, **ON_STOCK)
    assert program.code == 0, program.output[-4000:]
    found = json.loads(program.out.splitlines()[-1])
    assert {len(answer) for answer in found["answers"]} == {engines.NUM_TOKENS}
    assert "top_k_top_p_sample" in found["ops"]
