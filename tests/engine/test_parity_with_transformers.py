"""Whole models compared with transformers' own greedy generation, in fp32, token for token."""

import models
import pytest
from engines import generate, served, tokens

from vllm_opset.platform.bridges import has

NUM_TOKENS = 48
# If two logits nearly tie, either token would be right, and the model would prove nothing. The logits are of the order
# of 10, and fp32 leaves about 1e-5 of them open.
MARGIN = 1e-4

pytestmark = [pytest.mark.engine, pytest.mark.window]

LLAMA_LIKE = {"rms_norm", "fused_add_rms_norm", "rotary_embedding", "silu_and_mul"}
# The activation of the experts is a part of fused_experts.
MIXTURE = {"rms_norm", "rotary_embedding", "route", "fused_experts"}
GEMMA_LIKE = LLAMA_LIKE - {"silu_and_mul"} | {"gelu_and_mul"}
OPS = {
    "qwen3": LLAMA_LIKE,
    "llama3": LLAMA_LIKE,
    "mistral": LLAMA_LIKE,
    "gemma2": GEMMA_LIKE,
    "gemma3": GEMMA_LIKE,
    "gemma4": GEMMA_LIKE - {"fused_add_rms_norm"},
    "exaone4": LLAMA_LIKE - {"fused_add_rms_norm"},
    # vLLM has code of its own for it until 0.32; later it runs transformers' code, with its own LayerNorm.
    "gpt_neox": set(),
    **dict.fromkeys(models.MIXTURES, MIXTURE),
}
FUSED, IN_FUSED = {"rope_cache", "qk_norm_rope_cache"}, {"rotary_embedding", "reshape_and_cache"}
EITHER = {"gpt_neox": {"rotary_embedding", "layer_norm"}}


LAYERS_DIFFER = pytest.mark.skipif(
    not has("vllm.config.model_arch.ModelArchitectureConfig.__getitem__")(),
    reason="vLLM up to 0.27 reads no model of several head sizes: ends when 0.28 is the oldest supported release",
)
MODELS = [
    pytest.param(name, marks=LAYERS_DIFFER) if name == "gemma4" else name
    for name in (*models.CONFIGS, *models.MIXTURES)
]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal(name, engine, tmp_path):
    reference = models.build(name, tmp_path)
    prompts = models.prompts()
    # transformers runs first: for models without vLLM code, vLLM uses transformers' classes and leaves them changed.
    expected = [models.generate(reference, prompt, NUM_TOKENS) for prompt in prompts]
    # Prompts are prefilled in chunks of 64 tokens, next to requests that decode.
    with engine(tmp_path, max_num_batched_tokens=64) as llm:
        answers = tokens(generate(llm, prompts, max_tokens=NUM_TOKENS))
        ran = served(llm).keys()
    for prompt, answer, (right, margin) in zip(prompts, answers, expected, strict=True):
        assert margin > MARGIN, f"the model has a near-tie after {len(prompt)} tokens: choose another seed"
        assert answer == right, f"prompt of {len(prompt)} tokens"
    ops = OPS[name] | {"paged_attention", "reshape_and_cache", "top_k_top_p_sample"}
    if ran & FUSED:  # only on a GPU
        ops -= IN_FUSED
    assert ran >= ops
    assert name not in EITHER or ran & EITHER[name]
