"""vLLM's engine on device "npu:0": the tiny model's questions in bf16, and random models in fp32, token for token."""

import copy
import json
import sys

import asking
import emulated_npu
import engines
import models
import pytest
import torch
from conftest import TESTS
from engines import counter
from processes import run
from questions import HELD_OUT, MODEL, REQUIRED, grade

WITHOUT_FIRST = TESTS / "engine" / "without_first_runner.py"
LAYERS = {"rms_norm", "fused_add_rms_norm", "rotary_embedding"}
# The Ascend kernels that must have run. The reference attends the tiny model's heads of 32.
ASCENDS = {
    "qwen3": {*LAYERS, "silu_and_mul", "reshape_and_cache", "paged_attention", "top_k_top_p_sample"},
    "llama3": {*LAYERS, "silu_and_mul", "reshape_and_cache", "paged_attention", "top_k_top_p_sample"},
    "mistral": {*LAYERS, "silu_and_mul", "reshape_and_cache", "paged_attention", "top_k_top_p_sample"},
    # Gemma 2 has a soft cap, which the NPU's attention does not support.
    "gemma2": {*LAYERS, "gelu_and_mul", "reshape_and_cache", "top_k_top_p_sample"},
    "gemma3": {*LAYERS, "gelu_and_mul", "reshape_and_cache", "paged_attention", "top_k_top_p_sample"},
    # vLLM's layers of it add and normalise in two steps.
    "gemma4": {"rotary_embedding", "rms_norm", "gelu_and_mul", "reshape_and_cache", "paged_attention"},
    "exaone4": {"rms_norm", "rotary_embedding", "silu_and_mul", "paged_attention", "top_k_top_p_sample"},
    # vLLM has code of its own for it until 0.32; later it runs transformers' code, with its own LayerNorm.
    "gpt_neox": {"reshape_and_cache", "paged_attention", "top_k_top_p_sample"},
}
EITHER = {"gpt_neox": {"rotary_embedding", "layer_norm"}}


def by_ascend(ran: dict[str, set[str]]) -> set[str]:
    return {op for op, kernels in ran.items() if all(kernel.startswith("ascend") for kernel in kernels)}


def test_held_out_questions_are_answered_within_the_documented_limits(engine, strict):
    from vllm import SamplingParams
    from vllm.platforms import current_platform

    with engine(MODEL, dtype="bfloat16", max_num_seqs=128) as llm:
        assert type(current_platform).__name__ == "OpsetNpuPlatform"
        sampling = SamplingParams(temperature=0, max_tokens=64)
        answers = llm.generate([task["completion"] for task in HELD_OUT], sampling, use_tqdm=False)
        ran = asking.served(llm)
        (device,) = llm.collective_rpc(lambda worker: next(worker.get_model().parameters()).device)
    assert device == torch.device("npu:0")
    wrong = [
        (answer.prompt, answer.outputs[0].text)
        for task, answer in zip(HELD_OUT, answers, strict=True)
        if not grade(task["answer"], answer.outputs[0].text)
    ]
    assert len(wrong) <= (1 - REQUIRED) * len(HELD_OUT), wrong
    assert by_ascend(ran) >= ASCENDS["qwen3"] - {"paged_attention"}
    assert strict["atb::_npu_reshape_and_cache"] and strict["npu::npu_add_rms_norm"]


@pytest.mark.parametrize("name", models.CONFIGS)
def test_greedy_tokens_equal_those_of_transformers(name, engine, relaxed, tmp_path):
    reference = asking.build(name, tmp_path)
    expected = asking.expected(reference, asking.prompts())
    # Prompts are prefilled in chunks, next to requests that decode.
    with engine(tmp_path, max_num_batched_tokens=160) as llm:
        assert asking.tokens(llm, asking.prompts()) == expected
        ran = asking.served(llm)
    assert by_ascend(ran) >= ASCENDS[name]
    assert name not in EITHER or by_ascend(ran) & EITHER[name]


# Greedy requests that use most of the second model runner's kernels.
REQUESTS = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.2},
    "bias": {"logit_bias": {5: 20.0, 6: -100.0}},
    "allowed": {"allowed_token_ids": [10, 20, 30, 40]},
    "at least": {"min_tokens": 20, "stop_token_ids": list(range(3, 100)), "ignore_eos": False},
    "log-probabilities": {"logprobs": 5, "prompt_logprobs": 3},
}


def test_both_model_runners_answer_alike(engine, relaxed, tmp_path, monkeypatch):
    expected = asking.expected(asking.build("qwen3", tmp_path), asking.prompts())
    answers = []
    for variable, module in (("0", "vllm.v1.worker.gpu_model_runner"), ("1", "vllm.v1.worker.gpu.model_runner")):
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", variable)
        with engine(tmp_path, max_num_batched_tokens=160) as llm:
            (bases,) = llm.collective_rpc(lambda worker: type(worker.model_runner).__mro__)
            assert module in [base.__module__ for base in bases]
            assert asking.tokens(llm, asking.prompts()) == expected
            answers.append({name: asking.generate(llm, asking.prompts(), **asked) for name, asked in REQUESTS.items()})
            first, second = (asking.tokens(llm, asking.prompts(), temperature=1, top_k=20, seed=3) for _ in range(2))
        assert first == second != expected
    for name in REQUESTS:
        first, second = (engines.tokens(of_runner[name]) for of_runner in answers)
        assert first == second, name
    for of_first, of_second in zip(*(of_runner["log-probabilities"] for of_runner in answers), strict=True):
        for mine, theirs in zip(_logprobs(of_first), _logprobs(of_second), strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)


def test_the_second_runner_serves_without_the_first_one(tmp_path):
    """The day that vLLM removes its first model runner, `platform/v1` can go, and nothing breaks.

    The same holds for vLLM's IR. Nor does the engine need Triton.
    """
    models.build("qwen3", tmp_path)
    variables = emulated_npu.variables() | {"OPSET_PLATFORM": "npu"}
    variables["PYTHONPATH"] += f":{WITHOUT_FIRST.parent}"
    program = run(sys.executable, WITHOUT_FIRST, tmp_path, "triton", **variables)
    assert program.code == 0, program.output[-4000:]
    found = json.loads(program.out.splitlines()[-1])
    assert {len(answer) for answer in found["answers"]} == {engines.NUM_TOKENS}
    assert {"rms_norm", "fused_add_rms_norm", "paged_attention", "top_k_top_p_sample"} <= set(found["ops"])


def _logprobs(output) -> list[dict[int, float]]:
    steps = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return [{token: found.logprob for token, found in step.items()} for step in steps]


def test_atbs_attention_decodes_where_an_override_names_it(engine, relaxed, tmp_path):
    reference = asking.build("qwen3", tmp_path)
    overrides = {"opset": {"kernels": {"paged_attention": "ascend_atb"}}}
    with engine(tmp_path, max_num_batched_tokens=160, additional_config=overrides) as llm:
        assert asking.tokens(llm, asking.prompts()) == asking.expected(reference, asking.prompts())
        assert asking.served(llm)["paged_attention"] == {"ascend_atb"}
    assert relaxed["atb::_npu_paged_attention"] and relaxed["npu::npu_fused_infer_attention_score"]


def test_cached_prefixes_change_no_token(engine, relaxed, tmp_path):
    reference = asking.build("qwen3", tmp_path)
    (prompt,) = models.prompts([290])
    asked = [prompt, prompt, [*prompt[:200], 5, 6, 7]]
    with engine(tmp_path, max_num_batched_tokens=160) as llm:
        outputs = [asking.generate(llm, [one])[0] for one in asked]
    assert [output.num_cached_tokens for output in outputs] == [0, 256, 128], "blocks of 128 tokens"
    assert [list(output.outputs[0].token_ids) for output in outputs] == asking.expected(reference, asked)


def test_preempted_requests_go_on_as_if_nothing_had_been(engine, relaxed, tmp_path):
    reference = asking.build("qwen3", tmp_path)
    prompts = models.prompts((120, 200, 250))
    with engine(tmp_path, num_gpu_blocks_override=6, enable_prefix_caching=False) as llm:
        assert asking.tokens(llm, prompts) == asking.expected(reference, prompts)
        assert counter(llm, "num_preemptions") > 0


def test_seeded_requests_do_not_depend_on_their_batch(engine, relaxed, tmp_path):
    asking.build("qwen3", tmp_path)
    prompts = asking.prompts()[1:4]
    sampling = {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 7}
    with engine(tmp_path, max_num_batched_tokens=160) as llm:
        together = asking.tokens(llm, prompts, **sampling)
        alone = [asking.tokens(llm, [prompt], **sampling)[0] for prompt in prompts]
        other = asking.tokens(llm, prompts, **sampling | {"seed": 8})
    assert together == alone
    assert together != other


def logprobs_of(model, tokens: list[int]) -> torch.Tensor:
    """The model's log-probability of each token except the first, in fp32."""
    with torch.inference_mode():
        logprobs = model(torch.tensor([tokens])).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_bfloat16_errs_as_transformers_does_within_the_documented_limits(name, engine, strict, tmp_path):
    """Uses transformers' own answers in fp32 as prompts, so that a different token does not end the comparison."""
    reference = asking.build(name, tmp_path)
    answers = asking.expected(reference, asking.prompts())
    asked = [prompt + answer for prompt, answer in zip(asking.prompts(), answers, strict=True)]
    with engine(tmp_path, dtype="bfloat16", max_num_batched_tokens=160) as llm:
        outputs = asking.generate(llm, asked, max_tokens=1, prompt_logprobs=0)
        ran = asking.served(llm)
    assert by_ascend(ran) >= ASCENDS[name] and strict["npu::npu_fused_infer_attention_score"]
    rounded = copy.deepcopy(reference).bfloat16()
    for answer, output in zip(asked, outputs, strict=True):
        steps = zip(answer[1:], output.prompt_logprobs[1:], strict=True)
        got = torch.tensor([step[token].logprob for token, step in steps])
        error, usual = ((x - logprobs_of(reference, answer)).abs().mean() for x in (got, logprobs_of(rounded, answer)))
        assert error < 1.25 * usual


def test_an_encoder_embeds_as_transformers_does(engine, relaxed, tmp_path):
    """Runs without a cache and a mask: the reference attends; norms and activations are Ascend's if any."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    shape = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
    model = BertModel(BertConfig(**shape, vocab_size=models.VOCABULARY, initializer_range=0.1), add_pooling_layer=False)
    model.eval().save_pretrained(tmp_path)
    models.add_tokenizer(tmp_path)
    prompts = models.prompts((3, 40, 200))
    with engine(tmp_path, runner="pooling", pooler_config={"pooling_type": "CLS"}) as llm:
        outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in prompts], use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).last_hidden_state[0, 0]
        embedding = torch.nn.functional.normalize(expected, dim=0)
        assert torch.allclose(torch.tensor(output.outputs.embedding), embedding, atol=1e-4)
