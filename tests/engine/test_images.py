"""Multimodal models with images, compared with transformers' own greedy generation, in fp32, token for token."""

import images
import pytest
import torch
import torchvision_stand_in
from engines import served, tokens
from images import END, IMAGE, START, picture
from test_parity_with_transformers import MARGIN
from vllm import SamplingParams

from vllm_opset.platform import second_runner

NUM_TOKENS = 24
PICTURE = f"{START}{IMAGE}{END}"

pytestmark = [
    pytest.mark.engine,
    pytest.mark.window,
    pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs serve no multimodal model without compiled kernels"),
]

# In the vision tower, or between the towers.
OPS = {"llava": {"quick_gelu", "gelu"}, "qwen2_5_vl": {"apply_rotary_emb"}, "qwen3_vl": {"apply_rotary_emb"}}
IMPORTS = pytest.mark.skipif(
    not second_runner.replaces_triton_kernels(),
    reason="vLLM up to 0.30 imports a class that the pinned transformers has renamed: ends when 0.31 is the oldest",
)
MODELS = [pytest.param(name, marks=IMPORTS) if name == "llava" else name for name in images.CONFIGS]
# Two prompts differ only in the picture. Their tokens are more than a step takes at a time.
PROMPTS = [
    (f"a{PICTURE}b", [picture(40, 24, 0)]),
    (f"{PICTURE} and {PICTURE}?", [picture(24, 40, 1), picture(64, 48, 2)]),
    ("only text", []),
    (f"a{PICTURE}b", [picture(40, 24, 3)]),
]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal(name, engine, tmp_path, monkeypatch):
    torchvision_stand_in.install(monkeypatch)
    reference, processor = images.build(name, tmp_path, monkeypatch)
    expected = [images.expected(reference, processor, *prompt, NUM_TOKENS) for prompt in PROMPTS]
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with engine(tmp_path, max_num_batched_tokens=64, limit_mm_per_prompt={"image": 2, "video": 0}) as llm:
        answers = tokens(llm.generate([images.asked(*prompt) for prompt in PROMPTS], greedy, use_tqdm=False))
        ran = served(llm).keys()
    for (text, _), answer, (right, margin) in zip(PROMPTS, answers, expected, strict=True):
        assert margin > MARGIN, f"the model has a near-tie after {text}: choose another seed"
        assert answer == right, text
    assert answers[0] != answers[3]
    assert ran >= OPS[name] | {"paged_attention", "rms_norm"}
