"""Mixtures of experts and int8 weights (W8A8) in vLLM's engine on device "npu:0", token for token."""

import shutil

import asking
import pytest
import quantised
import torch
from questions import HELD_OUT, MODEL
from test_engine_on_npu import logprobs_of
from test_held_out_questions import REQUIRED_QUANTISED, wrong
from transformers import AutoModelForCausalLM
from vllm import SamplingParams

TASKS = HELD_OUT[::6]  # enough for the share that is required
PROMPTS = asking.prompts()[1:4]
# The references quantise and multiply what the kernels do.
REFERENCES = {"opset": {"kernels": dict.fromkeys(("linear", "quantise", "route", "fused_experts"), "reference")}}
# The changes to a model, and the kernel that routes. docs know groups of three experts and more.
MIXTURES = {
    "qwen3_moe": ({}, "ascend"),
    "glm4_moe": ({"n_group": 2, "topk_group": 1}, "ascend_gating_top_k"),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_of_experts_give_the_tokens_of_transformers(name, engine, relaxed, tmp_path):
    changes, routes = MIXTURES[name]
    reference = asking.build(name, tmp_path, **changes)
    with engine(tmp_path, max_num_batched_tokens=160) as llm:
        assert asking.tokens(llm, asking.prompts()) == asking.expected(reference, asking.prompts())
        ran = asking.served(llm)
    assert ran["route"] == {routes} and ran["fused_experts"] == {"ascend"}
    assert relaxed["npu::npu_grouped_matmul"] == 2 * relaxed["npu::npu_moe_finalize_routing"] > 0


def test_held_out_questions_are_answered_with_int8_weights(engine, strict, tmp_path):
    shutil.copytree(MODEL, tmp_path, dirs_exist_ok=True)
    quantised.round_to_int8(MODEL, tmp_path)
    with engine(tmp_path, dtype="bfloat16", max_num_seqs=128) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=64)
        answers = llm.generate([task["completion"] for task in TASKS], sampling, use_tqdm=False)
        ran = asking.served(llm)
    missed = wrong(TASKS, answers)
    assert len(missed) <= (1 - REQUIRED_QUANTISED) * len(TASKS), missed
    assert "ascend" in ran["linear"] and ran["quantise"] == {"ascend"}
    assert strict["npu::npu_quant_matmul"] == strict["npu::npu_dynamic_quant"] > 0


def test_int8_experts_err_as_the_references_do(engine, relaxed, tmp_path):
    """Rounding to int8 makes a step of a last bit, so tokens part in the end. Log-probabilities hardly do."""
    plain, folder = tmp_path / "plain", tmp_path / "int8"
    folder.mkdir()
    quantised.save_plain(plain, quantised.INT8, "qwen3_moe")
    quantised.save_compressed(plain, folder, quantised.INT8)
    with engine(folder, additional_config=REFERENCES) as llm:
        by_references = logprobs(llm)
    assert not relaxed["npu::npu_quant_matmul"] and not relaxed["npu::npu_grouped_matmul"]
    with engine(folder) as llm:
        by_kernels, ran = logprobs(llm), asking.served(llm)
    assert "ascend" in ran["linear"] and ran["quantise"] == ran["fused_experts"] == {"ascend"}
    assert relaxed["npu::npu_quant_matmul"] and relaxed["npu::npu_grouped_matmul"]
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    unquantised = torch.cat([logprobs_of(model, prompt) for prompt in PROMPTS])
    of_kernels, of_int8 = ((x - by_references).abs().mean() for x in (by_kernels, unquantised))
    assert of_kernels < 0.25 * of_int8


def logprobs(llm) -> torch.Tensor:
    """The log-probability of each token of the prompts except their first."""
    outputs = asking.generate(llm, PROMPTS, max_tokens=1, prompt_logprobs=0)
    steps = (zip(o.prompt_token_ids[1:], o.prompt_logprobs[1:], strict=True) for o in outputs)
    return torch.tensor([step[token].logprob for pairs in steps for token, step in pairs])
