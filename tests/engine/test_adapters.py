"""LoRA adapters on a CPU: an answer with an adapter is that of the model into whose weights the adapter is merged."""

import adapters
import models
import pytest
import quantised
import torch
from engines import counter, is_first_runner, runner, served

from vllm_opset.kernels import cpp
from vllm_opset.model import packed_linear
from vllm_opset.platform import runners, second_runner

pytestmark = [
    pytest.mark.engine,
    pytest.mark.window,
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu_features.py has an adapter on a GPU: runs without"),
]

SLOTS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": max(adapters.RANKS)}
NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
FORMATS = {
    "fp8": (quantised.FP8, lambda *folders: quantised.save_compressed(*folders, quantised.FP8)),
    "int8": (quantised.INT8, lambda *folders: quantised.save_compressed(*folders, quantised.INT8)),
    "int4": (quantised.INT4, lambda *folders: quantised.save_int4(*folders, "awq", 32, zero_points=True)),
}


@pytest.mark.parametrize("asked", [None, "0"], ids=["default runner", "first runner"])
def test_requests_of_a_batch_have_adapters_of_their_own(asked, engine, tmp_path, monkeypatch):
    """Of attention, MLP, embedding and LM head. More adapters are asked for than fit, so they take turns."""
    if asked is not None:
        if not second_runner.replaces_triton_kernels():
            pytest.skip("the default runner is the first one: both run with 0.31 and later")
        monkeypatch.setenv(runners.VARIABLE, asked)
    adapted = adapters.Adapted(tmp_path)
    with engine(adapted.model, max_num_batched_tokens=64, **SLOTS) as llm:
        assert is_first_runner(llm) == (asked == "0" or not second_runner.replaces_triton_kernels())
        for choices in ([0, 1, 2, 3, 1, 2], [3, 3, 1, 0, 0, 0]):
            adapted.check(llm, choices, prompt_logprobs=0)
        assert ("qk_norm_rope_cache" in served(llm)) == (cpp.unavailable() is None)
        assert llm.llm_engine.list_loras() < {1, 2, 3}
        # A server loads and unloads adapters by these.
        assert llm.llm_engine.remove_lora(1) or 1 not in llm.llm_engine.list_loras()
        assert llm.llm_engine.add_lora(adapted.requests[1]) and 1 in llm.llm_engine.list_loras()
        adapted.check(llm, [1, 0, 1, 1, 0, 0])


@pytest.mark.parametrize("name", ["bf16", *FORMATS])
def test_weights_beneath_an_adapter_may_be_packed_or_quantised(name, engine, tmp_path):
    plain = tmp_path / "bf16"
    plain.mkdir()
    grid, save = FORMATS.get(name, (quantised.FP8, None))
    quantised.save_plain(plain, grid)
    if save is not None:
        (tmp_path / name).mkdir()
        save(plain, tmp_path / name)
    beside = adapters.BesideMerged(plain)
    with engine(tmp_path / name, dtype="bfloat16", enable_lora=True) as llm:
        outputs = beside.generate(llm, adapters.NUM_TOKENS)
        layers = runner(llm).get_model().modules()
        methods = [vars(layer)["quant_method"] for layer in layers if "quant_method" in vars(layer)]
    beside.check(outputs)
    assert any(isinstance(method, packed_linear.PackedLinearMethod) for method in methods) == (save is None)


@pytest.mark.skipif(not second_runner.drafts_without_triton(), reason="opset refuses drafts: runs with 0.32 and later")
def test_drafts_beside_adapters_change_no_token(engine, tmp_path):
    adapted = adapters.Adapted(tmp_path, adapters.ADAPTED)
    adapted.prompts = [prompt * 3 for prompt in models.prompts((7, 16, 40))]  # these have something to repeat
    with engine(adapted.model, speculative_config=NGRAMS, lora_target_modules=[*adapters.ADAPTED], **SLOTS) as llm:
        adapted.check(llm, [0, 1, 2])
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0
