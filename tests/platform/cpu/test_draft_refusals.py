"""Speculative decoding on a CPU: what is served, and what is refused with the feature and the cure."""

from types import SimpleNamespace

import pytest
from small_models import LLAMA

from vllm_opset.platform import runners, second_runner
from vllm_opset.platform.cpu.refusals import DRAFTS, RULES
from vllm_opset.platform.drafts import KINDS
from vllm_opset.platform.refusals import Refusal, check

pytestmark = pytest.mark.window

NGRAMS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}


def test_drafts_by_n_grams_are_served_from_0_32_on(configure, monkeypatch):
    if not second_runner.drafts_without_triton():
        with pytest.raises(Exception, match=r"speculative decoding before vLLM 0\.32: take a later release"):
            configure(LLAMA, speculative_config=NGRAMS)
        return
    configure(LLAMA, speculative_config=NGRAMS)
    monkeypatch.setenv(runners.VARIABLE, "0")
    with pytest.raises(Exception, match=f"with vLLM's first model runner: unset {runners.VARIABLE}"):
        configure(LLAMA, speculative_config=NGRAMS)


def drafting(**changes) -> SimpleNamespace:
    """A speculative configuration."""
    plain = {
        "method": "ngram",
        "draft_model_config": SimpleNamespace(quantization=None),
        "draft_sample_method": "greedy",
        "rejection_sample_method": "standard",
        "enable_adaptive_verification": False,
        "use_multi_module_mtp": lambda: False,
    }
    return SimpleNamespace(**plain | changes)


@pytest.fixture
def drafts_are_served(configure, monkeypatch):
    """A configuration for a model without drafts, of a release that has the kernels for drafts that are replaced."""
    config = configure(LLAMA)
    monkeypatch.setattr(type(config), "use_v2_model_runner", True)
    for name in ("replaces_triton_kernels", "drafts_without_triton"):
        monkeypatch.setattr(second_runner, name, lambda: True)
    return config


@pytest.mark.parametrize(
    ("feature", "changes"),
    [
        ("speculative decoding by another method", {"method": "dflash"}),
        (
            "a model that drafts with quantised weights",
            {"method": "eagle", "draft_model_config": SimpleNamespace(quantization="fp8")},
        ),
        ("another backend, KV cache or LM head", {"method": "eagle", "draft_lm_head_quantization": "fp8"}),
        ("another backend, KV cache or LM head", {"method": "eagle", "attention_backend": "TRITON_ATTN"}),
        ("parallel drafting", {"method": "draft_model", "use_heterogeneous_vocab": True}),
        ("MTP by several modules", {"method": "mtp", "use_multi_module_mtp": lambda: True}),
        ("drafts that a model draws", {"method": "draft_model", "draft_sample_method": "probabilistic"}),
        ("other ways to verify drafts", {"rejection_sample_method": "block"}),
        ("other ways to verify drafts", {"enable_adaptive_verification": True}),
    ],
)
def test_drafts_that_are_not_served_are_refused(feature, changes, drafts_are_served):
    drafts_are_served.speculative_config = drafting(**changes)
    with pytest.raises(Refusal, match=feature):
        check(RULES, drafts_are_served, "here")


@pytest.mark.parametrize("modules", [None, ["q_proj", "model.lm_head"]])
def test_drafts_beside_adapters_of_the_head_are_refused(modules, drafts_are_served):
    """By default, an adapter may change the LM head."""
    drafts_are_served.speculative_config = drafting()
    drafts_are_served.lora_config = SimpleNamespace(target_modules=modules)
    with pytest.raises(Refusal, match="give --lora-target-modules without lm_head"):
        check(RULES, drafts_are_served, "here")
    drafts_are_served.lora_config = SimpleNamespace(target_modules=["q_proj"])
    check(RULES, drafts_are_served, "here")


@pytest.mark.parametrize("method", KINDS)
def test_these_methods_draft(method, drafts_are_served):
    as_its_target = {"moe_backend": "auto", "attention_backend": "CUSTOM", "kv_cache_dtype": "auto"}
    drafts_are_served.speculative_config = drafting(method=method, **as_its_target)
    check(RULES, drafts_are_served, "here")


def test_every_rule_for_drafts_is_tested():
    (cases,) = (
        mark.args[1] for mark in test_drafts_that_are_not_served_are_refused.pytestmark if mark.name != "window"
    )
    tested = [feature for feature, _ in cases]
    tested += ["speculative decoding before", "speculative decoding with vLLM's first", "decoding beside adapters"]
    assert not [rule.feature for rule in DRAFTS if not any(feature in rule.feature for feature in tested)]
