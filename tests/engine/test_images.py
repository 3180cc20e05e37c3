"""Multimodal models with images, compared with transformers' own greedy generation, in fp32, token for token."""

import images
import pytest
import torch
import torchvision_stand_in
from engines import served, tokens
from images import picture
from test_parity_with_transformers import MARGIN
from vllm import SamplingParams
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture as Capture

from vllm_opset.platform import second_runner

NUM_TOKENS = 24

pytestmark = [pytest.mark.engine, pytest.mark.window]
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU captures no graphs: runs on an NVIDIA GPU")

# In the vision tower, or between the towers.
OPS = {
    "llava": {"quick_gelu", "gelu"},
    "qwen2_5_vl": {"apply_rotary_emb"},
    "qwen3_vl": {"apply_rotary_emb"},
    "gemma3": {"gelu_and_mul"},
}
# vLLM's module of Llava imports a class that transformers has renamed. Its placeholders for Gemma-3 lack pictures.
FITS = pytest.mark.skipif(
    not second_runner.replaces_triton_kernels(),
    reason="vLLM up to 0.30 does not fit the pinned transformers: ends when 0.31 is the oldest supported release",
)
MODELS = [pytest.param(name, marks=FITS) if name in ("llava", "gemma3") else name for name in images.CONFIGS]
# Two prompts differ only in the picture. Their tokens are more than a step takes at a time.
PROMPTS = [
    ("a{0}b", [picture(40, 24, 0)]),
    ("{0} and {0}?", [picture(24, 40, 1), picture(64, 48, 2)]),
    ("only text", []),
    ("a{0}b", [picture(40, 24, 3)]),
]


@pytest.mark.parametrize("eager", [False, pytest.param(True, marks=ON_GPU)], ids=["", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal(name, eager, engine, tmp_path, monkeypatch):
    """On a GPU, piecewise graphs replay steps with images, unless graphs are off."""
    replay, replayed = Capture.replay, []
    monkeypatch.setattr(Capture, "replay", lambda self: replayed.append(self.num_eager_breaks) or replay(self))
    torchvision_stand_in.install(monkeypatch)
    reference, processor = images.build(name, tmp_path, monkeypatch)
    prompts = [(text.format(images.placeholder(name)), pictures) for text, pictures in PROMPTS]
    expected = [images.expected(reference, processor, *prompt, NUM_TOKENS) for prompt in prompts]
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    limits = {"max_num_batched_tokens": 64, "block_size": 16, "limit_mm_per_prompt": {"image": 2, "video": 0}}
    with engine(tmp_path, enforce_eager=eager, **limits) as llm:
        replayed.clear()  # vLLM's second runner replays a step when it starts
        answers = tokens(llm.generate([images.asked(*prompt) for prompt in prompts], greedy, use_tqdm=False))
        (again,) = llm.generate(images.asked(*prompts[0]), greedy, use_tqdm=False)
        ran = served(llm).keys()
    for (text, _), answer, (right, margin) in zip(prompts, answers, expected, strict=True):
        assert margin > MARGIN, f"the model has a near-tie after {text}: choose another seed"
        assert answer == right, text
    assert answers[0] != answers[3]
    assert again.num_cached_tokens == 16, "the cache does not end within the picture"
    assert tokens([again]) == answers[:1]
    assert ran >= OPS[name] | {"paged_attention", "rms_norm"}
    assert any(replayed) is (torch.cuda.is_available() and not eager)


@pytest.mark.parametrize("name", ["qwen3_vl", pytest.param("gemma3", marks=[FITS, ON_GPU])])
def test_text_alone_is_served(name, engine, tmp_path, monkeypatch):
    torchvision_stand_in.install(monkeypatch)
    reference, processor = images.build(name, tmp_path, monkeypatch)
    text = "no pictures are to come"
    right, margin = images.expected(reference, processor, text, [], NUM_TOKENS)
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with engine(tmp_path, limit_mm_per_prompt={"image": 0, "video": 0}) as llm:
        assert margin > MARGIN and tokens(llm.generate(text, greedy, use_tqdm=False)) == [right]
