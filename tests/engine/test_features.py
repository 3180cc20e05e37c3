"""vLLM's engine features on opset's platform. Few engines, each with many features."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import models
import pytest
import torch
from engines import NUM_TOKENS, counter, generate, is_first_runner, report, tokens

from vllm_opset.platform import second_runner
from vllm_opset.platform.v1 import input_batch
from vllm_opset.selection import PREFERENCE
from vllm_opset.unsupported import Refusal

REPLACED = Path(__file__).with_name("replaced.py")
# Functions that an engine on a CPU replaces, and the code that replaces them.
ALLOWED = {
    "vllm.envs.__getattr__": "vLLM itself turns the caching of its environment on",
    "vllm.v1.utils._PROFILER_FUNC": "vLLM itself chooses what marks a step for profilers when it first does",
    "vllm.model_executor.models.registry._run_in_subprocess": "opset, when arguments are read: docs/changes-to-vllm.md",
    "vllm.model_executor.models.registry._ModelRegistry.inspect_model_cls": "the same",
    "vllm.engine.arg_utils.EngineArgs.create_engine_config": "the same",
    "vllm.sampling_params.SamplingParams.update_from_tokenizer": "the same",
    "vllm.config.vllm.VllmConfig.try_verify_and_update_config": "the same",
    "vllm.config.vllm.VllmConfig._get_quantization_config": "the same",
}
ON_GPU = {
    "vllm.v1.worker.workspace._manager._alloc_context": "vLLM itself makes it for each engine",
}
# The same, with either of vLLM's model runners.
WITH_FIRST = {
    "torch.accelerator.empty_cache": "vLLM's own model runner for CPUs, which opset's extends",
    "torch.accelerator.synchronize": "vLLM's own model runner too",
}
ALLOWED_TOKENS = input_batch.keep_allowed_tokens_apart.bridge
WITH_SECOND = {
    "vllm.triton_utils.triton.next_power_of_2": "opset, where there is no Triton: docs/changes-to-vllm.md",
    **dict.fromkeys(second_runner.name_cpu_as_cuda.bridge.changes, "opset: nothing runs beside a CPU"),
}

pytestmark = [pytest.mark.engine, pytest.mark.window]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A folder with a random Qwen3 and a tokenizer, and transformers' model of it."""
    folder = tmp_path_factory.mktemp("qwen3")
    model = models.build("qwen3", folder)
    models.add_tokenizer(folder)
    return folder, model


def test_one_request_at_a_time_may_fill_its_context(qwen, engine):
    """The KV cache is no larger than that needs, and vLLM keeps a block of it for itself."""
    with engine(qwen[0], max_num_seqs=1, max_model_len=64) as llm:
        (output,) = generate(llm, [list(range(3, 43))], max_tokens=24)
    assert len(tokens([output])[0]) == 24


@pytest.fixture(scope="module")
def llm(qwen, engine):
    """An engine with a KV cache of 40 pages, which cannot hold the prompts of these tests all at once."""
    with engine(qwen[0], max_num_batched_tokens=64, num_gpu_blocks_override=40, max_logprobs=-1) as llm:
        yield llm


@pytest.fixture(scope="module")
def greedy(qwen):
    """The answers of transformers to all prompts."""
    return [models.generate(qwen[1], prompt, NUM_TOKENS)[0] for prompt in models.prompts()]


def test_preempted_requests_go_on_as_if_nothing_had_been(llm, greedy):
    before = counter(llm, "num_preemptions")
    assert tokens(generate(llm, models.prompts() * 4)) == greedy * 4
    assert counter(llm, "num_preemptions") > before


def test_cached_prefixes_change_no_token(llm, qwen):
    prompt = models.prompts([120])[0]
    answers = [generate(llm, [prompt + suffix])[0] for suffix in ([], [], [5, 6, 7])]
    assert [answer.num_cached_tokens for answer in answers] == [0, 112, 112]
    expected = [models.generate(qwen[1], prompt + suffix, NUM_TOKENS)[0] for suffix in ([], [], [5, 6, 7])]
    assert tokens(answers) == expected


def test_log_probabilities_of_prompt_and_answer(llm, qwen):
    """Compares all log-probabilities with transformers' logits."""
    prompt = models.prompts([77])[0]
    (output,) = generate(llm, [prompt], logprobs=-1, prompt_logprobs=-1, max_tokens=4)
    ids = prompt + list(output.outputs[0].token_ids)
    with torch.inference_mode():
        expected = qwen[1](torch.tensor([ids])).logits[0].log_softmax(-1)
    actual = output.prompt_logprobs[1:] + list(output.outputs[0].logprobs)
    assert len(actual) == len(ids) - 1
    for step, logprobs in enumerate(actual):
        row = torch.tensor([logprobs[token].logprob for token in range(models.VOCABULARY)])
        torch.testing.assert_close(row, expected[step], rtol=1e-4, atol=1e-4)


def test_several_answers_to_one_prompt(llm):
    arguments = {"n": 3, "temperature": 1.0, "top_k": 40, "top_p": 0.9, "seed": 7}
    first, again = (generate(llm, models.prompts([40]), **arguments)[0].outputs for _ in range(2))
    answers = [tuple(answer.token_ids) for answer in first]
    assert len(set(answers)) == 3
    assert answers == [tuple(answer.token_ids) for answer in again]


def test_seeded_requests_draw_the_same_in_any_batch(llm):
    arguments = {"temperature": 1.0, "seed": 11, "min_p": 0.01, "repetition_penalty": 1.1, "presence_penalty": 0.1}
    prompts = models.prompts()
    assert tokens(generate(llm, prompts, **arguments)) == [tokens(generate(llm, [p], **arguments))[0] for p in prompts]


def test_structured_output(llm):
    from vllm.sampling_params import StructuredOutputsParams

    constraints = {
        r"[a-f]{4}-\d{3}": StructuredOutputsParams(regex=r"[a-f]{4}-\d{3}"),
        r"red|green|blue": StructuredOutputsParams(choice=["red", "green", "blue"]),
        r"\([0-9]+\+[0-9]+\)": StructuredOutputsParams(grammar='root ::= "(" n "+" n ")"\nn ::= [0-9] | [0-9] [0-9]'),
    }
    for pattern, constraint in constraints.items():
        arguments = {"structured_outputs": constraint, "ignore_eos": False, "temperature": 0.5, "seed": 3}
        outputs = generate(llm, models.prompts([7, 40]), **arguments)
        for answer in tokens(outputs):
            # Not `text`: the random prompts may end in the middle of a character.
            text = llm.get_tokenizer().decode(answer, skip_special_tokens=True)
            assert re.fullmatch(pattern, text), text


def test_bias_and_allowed_tokens(llm, greedy):
    prompt, (banned, *_) = models.prompts()[3], greedy[3]
    (biased,) = generate(llm, [prompt], logit_bias={banned: -100.0})
    assert banned not in biased.outputs[0].token_ids
    (allowed,) = generate(llm, [prompt], allowed_token_ids=[10, 20, 30])
    assert set(allowed.outputs[0].token_ids) <= {10, 20, 30}


def test_allowed_tokens_of_a_request_are_not_those_of_others(llm, greedy):
    """Requests end one after the other, so the others change their rows in the batch, and new ones get these rows."""
    from vllm import SamplingParams

    prompts, alone = models.prompts() * 8, greedy * 8
    parameters = [
        SamplingParams(
            temperature=0,
            max_tokens=4 * (number % 7) + 4,
            ignore_eos=True,
            allowed_token_ids=[10, 20, 30] if number % 3 == 1 else None,
        )
        for number in range(len(prompts))
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)
    for asked, answer, expected in zip(parameters, tokens(outputs), alone, strict=True):
        if asked.allowed_token_ids:
            assert set(answer) <= {10, 20, 30}
        else:
            assert answer == expected[: asked.max_tokens]


@pytest.mark.parametrize(
    ("words", "answer"), [([], "aaaaaa"), (["a"], "bbbbbb"), (["aa"], "ababab"), (["aa", "aba"], "abbabb")]
)
def test_bad_words(words, answer, llm):
    """The model would always say "a". Where that would end a bad word, it says "b"."""
    tokenizer = llm.get_tokenizer()
    a, b = tokenizer.encode("ab")
    asked = {"allowed_token_ids": [a, b], "logit_bias": {a: 100.0}, "bad_words": words, "max_tokens": len(answer)}
    outputs = generate(llm, models.prompts(), **asked)
    assert tokens(outputs) == [tokenizer.encode(answer)] * len(outputs)


@pytest.mark.parametrize("ends_by", ["a stop token", "the tokenizer's end"])
def test_an_answer_has_at_least_as_many_tokens_as_asked_for(ends_by, llm):
    """The model would end its answer at once. As long as that is not allowed, it says "b"."""
    tokenizer = llm.get_tokenizer()
    a, b = tokenizer.encode("ab")
    end = a if ends_by == "a stop token" else tokenizer.eos_token_id
    asked = {"logit_bias": {end: 200.0, b: 100.0}, "stop_token_ids": [a], "ignore_eos": False}
    for min_tokens in (0, 1, 5):
        outputs = generate(llm, models.prompts(), min_tokens=min_tokens, **asked)
        assert tokens(outputs) == [[*[b] * min_tokens, end]] * len(outputs)


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_was_sent_to_sleep_serves_again(level, llm, greedy):
    """It frees nothing, as without sleep mode. A server in development mode is sent to sleep over HTTP."""
    llm.sleep(level)
    llm.wake_up()
    assert tokens(generate(llm, models.prompts())) == greedy


def test_an_engine_that_was_told_to_release_its_cache_serves_again(llm, greedy):
    """It frees nothing either, and is not asleep for good."""
    if not hasattr(llm, "release_kv_cache_memory"):
        pytest.skip("vLLM up to 0.30 has no such call: ends when 0.31 is the oldest supported release")
    llm.llm_engine.step()  # an engine in this process tells its worker in the next step alone which requests ended
    llm.sleep(0)
    try:
        llm.release_kv_cache_memory()
    finally:
        llm.wake_up()  # otherwise, the tests after this one would wait for answers forever
    assert tokens(generate(llm, models.prompts())) == greedy


def test_the_report_counts(llm):
    from vllm.platforms import current_platform

    generate(llm, models.prompts()[:1])
    attention = next(row for row in report(llm) if row["op"] == "paged_attention")
    assert attention["kernel"] in PREFERENCE[current_platform.device_type] and attention["calls"] > 0
    assert "head_size=32" in attention["problem"] and attention["reason"]


@pytest.mark.parametrize("arguments", [{"enforce_eager": True}, {"enable_prefix_caching": False}, {"block_size": 32}])
def test_settings_that_change_no_token(arguments, qwen, engine, greedy):
    with engine(qwen[0], **arguments) as llm:
        assert tokens(generate(llm, models.prompts())) == greedy


@pytest.mark.parametrize("arguments", [{"dtype": "bfloat16"}, {"dtype": "float16"}])
def test_half_precision_agrees_with_full(arguments, qwen, engine):
    """The greedy tokens of a random model differ sooner or later. Its log-probabilities must stay close."""
    prompt = models.prompts([77])[0]
    with torch.inference_mode():
        expected = qwen[1](torch.tensor([prompt])).logits[0].log_softmax(-1)
    with engine(qwen[0], max_logprobs=-1, **arguments) as llm:
        (output,) = generate(llm, [prompt], prompt_logprobs=-1, max_tokens=1)
    errors = []
    for step, logprobs in enumerate(output.prompt_logprobs[1:]):
        row = torch.tensor([logprobs[token].logprob for token in range(models.VOCABULARY)])
        errors.append((row - expected[step]).abs().mean())
    # The worst case is three layers of roundings to 8 bits, of logits of the order of 10.
    assert torch.stack(errors).mean() < 0.2
    assert math.isfinite(torch.stack(errors).max())


@pytest.mark.parametrize("kernel", ["reference", "of the device"])
def test_overrides_reach_the_kernels(kernel, qwen, engine, greedy):
    from vllm.platforms import current_platform

    if kernel == "of the device":
        kernel = PREFERENCE[current_platform.device_type][-1]
    names = (
        "rms_norm",
        "fused_add_rms_norm",
        "rotary_embedding",
        "silu_and_mul",
        "paged_attention",
        "reshape_and_cache",
    )
    overrides = {"opset": {"kernels": dict.fromkeys(names, kernel)}}
    # Graphs cannot capture references, where there are graphs.
    with engine(qwen[0], additional_config=overrides, enforce_eager=True) as llm:
        assert tokens(generate(llm, models.prompts())) == greedy
        rows = report(llm)
    assert {row["kernel"] for row in rows if row["op"] in names} == {kernel}
    assert {row["reason"] for row in rows if row["op"] in names} == {"asked for by --additional-config"}


def test_a_wrong_override_is_an_error(qwen, engine):
    with (
        pytest.raises(Exception, match="unknown op 'rms_nom'; did you mean 'rms_norm'"),
        engine(qwen[0], additional_config={"opset": {"kernels": {"rms_nom": "cpu"}}}),
    ):
        pass


def test_requests_beyond_the_rotary_embedding_are_refused_at_the_start(engine, tmp_path):
    """vLLM goes by model_max_length. Without the refusal, the first request of such a length ends the engine."""
    models.build("qwen3", tmp_path, model_max_length=1024)
    refused = pytest.raises(Refusal, match="embedding has 512 positions: give --max-model-len 512")
    with refused, engine(tmp_path, max_model_len=1024) as llm:
        generate(llm, models.prompts([600]), max_tokens=1)
    with engine(tmp_path, max_model_len=512) as llm:
        (output,) = generate(llm, models.prompts([500]), max_tokens=12)
    assert len(tokens([output])[0]) == 12


def test_encoder_only_models_embed_as_transformers_does(engine, tmp_path):
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = {name: value for name, value in models.SMALL.items() if name not in ("bos_token_id", "eos_token_id")}
    model = BertModel(BertConfig(**config), add_pooling_layer=False).eval()
    model.save_pretrained(tmp_path)
    models.add_tokenizer(tmp_path)
    prompts = models.prompts([1, 7, 40, 150])
    with torch.inference_mode():
        expected = [model(torch.tensor([prompt])).last_hidden_state[0, 0] for prompt in prompts]
    with engine(tmp_path, runner="pooling", pooler_config={"pooling_type": "CLS"}) as llm:
        outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in prompts], use_tqdm=False)
    for output, vector in zip(outputs, expected, strict=True):
        embedding = torch.tensor(output.outputs.embedding)
        torch.testing.assert_close(embedding, torch.nn.functional.normalize(vector, dim=-1), rtol=1e-4, atol=1e-4)


def test_an_engine_replaces_no_function_of_vllm(llm, qwen):  # modules of `llm` are imported before the comparison
    """An engine has objects of its own and leaves vLLM's functions alone. Another test covers loading the plugin."""
    modules = [name for name in sys.modules if name.startswith("vllm.")]
    process = subprocess.run(
        [sys.executable, REPLACED, qwen[0]],
        input=json.dumps(modules),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    replaced = set(json.loads(process.stdout.splitlines()[-1]))
    if torch.cuda.is_available():
        assert replaced - ALLOWED.keys() - ON_GPU.keys() == set()
    else:
        patched = ALLOWED_TOKENS.changes if ALLOWED_TOKENS.needed() else ()
        with_first = WITH_FIRST | dict.fromkeys(patched, "opset: docs/changes-to-vllm.md")
        assert replaced == ALLOWED.keys() | (with_first if is_first_runner(llm) else WITH_SECOND).keys()
