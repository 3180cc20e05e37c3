"""Engine features that opset has on GPUs alone: drafted tokens and LoRA adapters."""

import functools

import adapters
import drafting
import engines
import models
import pytest
import quantised
import rounding
import torch
from engines import counter, served, tokens
from quantised_answers import QUANTISING

from vllm_opset.platform import second_runner

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: runs on one"),
]

NUM_TOKENS = 48
# Without graphs, vLLM compiles kernels of its own for drafts and adapters with their first request.
OPSET = "vllm_opset"
generate = functools.partial(engines.generate, max_tokens=NUM_TOKENS)
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def compiled_in(patch, by: str) -> list[str]:
    """The Triton kernels that are compiled from now on, of modules whose name begins so."""
    import triton

    names = []

    def note(**info) -> None:
        if info["fn"].module.startswith(by):
            names.append(info["repr"])

    patch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    return names


def check_seeds(llm, prompts: list[list[int]]) -> None:
    """Requests with a seed get the same tokens alone and together."""
    sampled = {"temperature": 1, "top_k": 20, "top_p": 0.9, "seed": 1}
    together = tokens(generate(llm, prompts, **sampled))
    assert [tokens(generate(llm, [prompt], **sampled))[0] for prompt in prompts] == together


@pytest.mark.parametrize("arguments", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
def test_drafts_by_n_grams_change_no_token(arguments, engine, tmp_path, monkeypatch):
    reference = models.build("qwen3", tmp_path)
    prompts = [prompt * 3 for prompt in models.prompts() if len(prompt) < 60]  # these have something to repeat
    expected = [models.generate(reference, prompt, NUM_TOKENS)[0] for prompt in prompts]
    with engine(tmp_path, speculative_config=DRAFTS, **arguments) as llm:
        compiled = compiled_in(monkeypatch, OPSET if arguments else "")
        assert tokens(generate(llm, prompts)) == expected
        check_seeds(llm, prompts)
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0
    assert not compiled


@pytest.mark.parametrize("arguments", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
@pytest.mark.parametrize("method", drafting.METHODS)
def test_drafts_of_a_model_change_no_token(method, arguments, engine, tmp_path, monkeypatch):
    target, draft = tmp_path / "target", tmp_path / "draft"
    for folder in (target, draft):
        folder.mkdir()
    reference = drafting.METHODS[method](target, draft)
    prompts = models.prompts()
    expected = [models.generate(reference, prompt, NUM_TOKENS)[0] for prompt in prompts]
    speculative = drafting.config(method, draft, num_tokens=3)
    with engine(target, speculative_config=speculative, **arguments) as llm:
        compiled = compiled_in(monkeypatch, OPSET)  # vLLM compiles kernels that verify drafts with the first request
        captures = method == "draft_model" and not arguments and second_runner.draft_by.bridge.needed()
        assert ("_run_model" in vars(engines.runner(llm).speculator)) is captures, "graphs of a draft model"
        assert tokens(generate(llm, prompts)) == expected
        accepted, drafted = (counter(llm, f"spec_decode_num_{what}_tokens") for what in ("accepted", "draft"))
        assert accepted / drafted >= drafting.ACCEPTED.get(method, 0)
        check_seeds(llm, prompts)
    assert not compiled


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("plain", {}), ("plain", {"enforce_eager": True}), ("channelwise", {})],
    ids=["graphs", "eager", "fp8 weights"],
)
def test_an_adapter_answers_as_merged_weights_do(name, arguments, engine, tmp_path, monkeypatch):
    """An adapter reads a layer's input as it is, also where a norm has quantised it for the layer's own weight."""
    for folder in ("plain", "channelwise"):
        (tmp_path / folder).mkdir()
    quantised.save_plain(tmp_path / "plain")
    quantised.save_compressed(tmp_path / "plain", tmp_path / "channelwise", quantised.FP8)
    beside = adapters.BesideMerged(tmp_path / "plain")
    with engine(tmp_path / name, dtype="bfloat16", enable_lora=True, **arguments) as llm:
        compiled = compiled_in(monkeypatch, OPSET if arguments else "")
        outputs = beside.generate(llm, NUM_TOKENS)
        assert name == "plain" or served(llm).keys() >= QUANTISING
    beside.check(outputs, rounding.INPUTS.get(name))
    assert not compiled
