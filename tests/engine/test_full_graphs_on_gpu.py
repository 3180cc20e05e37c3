"""Prompts and mixed steps that full graphs replay, on Hopper GPUs with vLLM's second model runner."""

import functools

import engines
import models
import pytest
import torch

from vllm_opset.platform import second_runner

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not HOPPER, reason="needs an NVIDIA GPU of the Hopper generation: runs on one"),
    pytest.mark.skipif(
        not second_runner.capture_full_for_piecewise.bridge.needed(),
        reason="this vLLM prepares no graph for one request that has all tokens: runs with 0.31 and later",
    ),
]

HEAD_SIZE = 64  # the smallest that the kernel for Hopper takes
generate = functools.partial(engines.generate, max_tokens=24, logprobs=0)
# Prompts in one step, in chunks beside decoded tokens, and again after their blocks were taken from them.
LIMITS = {
    "prompts": {},
    "chunks": {"max_num_batched_tokens": 64},
    "chunks and preemption": {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 80},
    "more tokens than are captured": {"compilation_config": {"max_cudagraph_capture_size": 64}},
}
# bf16 has 8 bits of mantissa, and the logits of these models spread differently. Twice the error on a CPU, in bf16.
MEAN_ERROR = {"qwen3": 0.055, "mistral": 0.16, "gemma2": 0.015, "qwen3_moe": 0.09, "gpt_oss": 0.2}


@pytest.mark.parametrize("name", MEAN_ERROR)
@pytest.mark.parametrize("limits", LIMITS)
def test_answers_in_bfloat16_are_near_those_in_fp32(limits, name, engine, tmp_path, monkeypatch):
    reference = models.build(name, tmp_path, head_dim=HEAD_SIZE)
    prompts = models.prompts() * 4
    replayed = []
    with engine(tmp_path, dtype="bfloat16", enable_prefix_caching=False, **LIMITS[limits]) as llm:
        manager = type(engines.runner(llm).cudagraph_manager)
        replay = manager.run_fullgraph
        monkeypatch.setattr(manager, "run_fullgraph", lambda self, graph: replayed.append(graph) or replay(self, graph))
        outputs = generate(llm, prompts) + generate(llm, prompts[1:2])
        preempted = engines.counter(llm, "num_preemptions") > 0
    assert any(graph.uniform_token_count is None for graph in replayed), "no prompt was replayed"
    assert any(graph.uniform_token_count == 1 for graph in replayed), "no step of decode was replayed"
    # Mistral keeps the blocks of a window alone, which all fit.
    assert preempted is ("num_gpu_blocks_override" in LIMITS[limits] and name != "mistral")
    assert models.mean_error(reference, [*prompts, prompts[1]], engines.chosen(outputs)) < MEAN_ERROR[name]
