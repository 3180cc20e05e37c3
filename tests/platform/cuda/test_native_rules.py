"""Every rule of a native part, with a configuration that triggers it.

The test fails if a rule is removed, or if a new rule has no example here.
"""

import functools
from types import SimpleNamespace

import pytest
import torch
from small_models import QWEN3
from vllm.config import PassConfig

from vllm_opset.platform.native import evidence, parts
from vllm_opset.platform.refusals import Refusal

pytestmark = pytest.mark.window

HOPPER = 90
# By the feature that a rule names: the settings that enable it, as paths in a configuration, or as a variable.
EXAMPLES: dict[str, dict] = {
    "another worker class": {"parallel_config__worker_cls": "another.Worker"},
    "another attention backend": {"attention_config__backend": SimpleNamespace(name="TRITON_ATTN")},
    "multi-head latent attention (MLA)": {"model_config__use_mla": True},
    "multimodal prefix LMs (bidirectional attention within an image)": {"model_config__is_mm_prefix_lm": True},
    "encoders with a pooled KV cache (Voxtral Realtime)": {
        "model_config__hf_config": SimpleNamespace(audio_config=SimpleNamespace(block_pool_size=4))
    },
    "attention in chunks that look back (Rnj-1)": {
        "model_config__architectures": ["Rnj1ForCausalLM"],
        "model_config__hf_text_config__layer_types": ["chunked_attention"],
    },
    "windows of generated tokens (R-SWA)": {"model_config__rswa_window": 128},
    "square-root ALiBi (Step1)": {"model_config__architectures": ["Step1ForCausalLM"]},
    "a KV cache in a dtype other than the model's and fp8 e4m3": {"cache_config__cache_dtype": "fp8_e5m2"},
    "KV connectors": {"kv_transfer_config": object()},
    "KV cache offloading": {"cache_config__kv_offloading_size": 1.0},
    "decode context parallelism": {"parallel_config__decode_context_parallel_size": 2},
    "prefill context parallelism": {"parallel_config__prefill_context_parallel_size": 2},
    "batch invariance": {"VLLM_BATCH_INVARIANT": "1"},
    "speculative decoding": {"speculative_config": SimpleNamespace(method="eagle")},
    "n-gram drafts": {"speculative_config": SimpleNamespace(method="ngram")},
    "drafts by a draft model": {"speculative_config": SimpleNamespace(method="draft_model")},
    "drafts by EAGLE": {"speculative_config": SimpleNamespace(method="eagle3")},
    "drafts by MTP": {"speculative_config": SimpleNamespace(method="mtp")},
    "drafts by other methods": {"speculative_config": SimpleNamespace(method="medusa")},
    "Mamba, state-space and linear attention": {"model_config__has_inner_state": True},
    "encoder-decoder models": {"model_config__is_encoder_decoder": True},
    "pooling models": {"model_config__runner_type": "pooling"},
    "multimodal models": {"model_config__is_multimodal_model": True},
    "an fp8 KV cache": {"cache_config__cache_dtype": "fp8"},
    "soft-capped attention": {"model_config__hf_text_config__attn_logit_softcapping": 50.0},
    "ALiBi": {"model_config__uses_alibi": True},
    "layers with different head sizes (Gemma-4)": {
        "model_config__hf_text_config__per_layer_config": [SimpleNamespace(head_dim=size) for size in (256, 512)]
    },
    "fp32": {"model_config__dtype": torch.float32},
    "fp64 sampling noise": {"model_config__use_fp64_gumbel": True},
    "sampling masks": {"model_config__return_sampling_mask": True},
    "watermarks": {"watermark_config": object()},
    "diffusion models": {"diffusion_config": object()},
    "weight offloading": {"offload_config__uva__cpu_offload_gb": 4.0},
    "another linear backend": {"kernel_config__linear_backend": "cutlass"},
    "quantised weights of another process": {
        "load_config__load_format": "ipc_cache",
        "model_config__quantization": "fp8",
    },
    "FBGEMM's fp8 weights": {"model_config__quantization": "fbgemm_fp8"},
    "optimisation levels 1 and 3 without a mode of torch.compile": {"optimization_level": 3},
    "passes of torch.compile without its mode": {"compilation_config__pass_config": PassConfig(fuse_norm_quant=True)},
    "a priority of IR ops": {"kernel_config__ir_op_priority": SimpleNamespace(rms_norm=["native"])},
    "fp8 weights": {"model_config__quantization": "fp8"},
    "gpt-oss's MXFP4 weights": {"model_config__quantization": "gpt_oss_mxfp4"},
    "weights in other quantised formats": {"model_config__quantization": "awq"},
    "mixture-of-experts (MoE) models": {"model_config__is_moe": True},
    "adapters (LoRA)": {"lora_config": object()},
    "tensor parallelism of 2": {"parallel_config__tensor_parallel_size": 2},
    "tensor parallelism of more than 2": {"parallel_config__tensor_parallel_size": 4},
    "pipeline parallelism": {"parallel_config__pipeline_parallel_size": 2},
    "data parallelism": {"parallel_config__data_parallel_size": 2},
    "dual batch overlap (DBO)": {"parallel_config__enable_dbo": True},
    "another layout of the KV cache before vLLM 0.29": {"VLLM_KV_CACHE_LAYOUT": "NHD"},
    "tensor descriptors in vLLM's own Triton kernels": {"VLLM_TRITON_USE_TD": "1"},
    "FlashInfer's sampler": {"VLLM_USE_FLASHINFER_SAMPLER": "1"},
    "models without experts": {"model_config__is_moe": False},
    "another backend for experts": {"kernel_config__moe_backend": "marlin"},
    "balancing experts between workers (EPLB)": {"parallel_config__enable_eplb": True},
    "returning the chosen experts": {"model_config__enable_return_routed_experts": True},
    "activations that vLLM's Marlin kernels quantise": {"VLLM_MARLIN_INPUT_DTYPE": "int8"},
    "simulated routing of experts": {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random"},
    "expert parallelism": {"parallel_config__enable_expert_parallel": True},
}
# What a part needs that no other part has.
NEEDS: dict[str, dict] = {"moe": {"model_config__is_moe": True}}
RULES = ("unsupported", "kinds")


class Changed:
    """An object with other values for some of its attributes, by path, whatever kind of attribute they are."""

    def __init__(self, base, changes: dict[str, object]) -> None:
        self._base, self._changes = base, changes

    def __getattr__(self, name: str):
        if name in self._changes:
            return self._changes[name]
        below = {
            path.partition("__")[2]: value for path, value in self._changes.items() if path.startswith(f"{name}__")
        }
        value = getattr(self._base, name)
        return Changed(value, below) if below else value


def for_part(name: str, made: Changed) -> Changed:
    """The same configuration, of a model that a part can have anything to do with."""
    return Changed(made._base, NEEDS.get(name, {}) | made._changes)


@functools.cache
def rules(name: str, which: str) -> dict[str, parts.Rule]:
    return {rule.feature: rule for rule in getattr(parts.RULES[name], which)}


@pytest.fixture
def changed(unprocessed, monkeypatch):
    """`changed(feature)`: a configuration that every part could serve, except for the feature."""
    row = dict.fromkeys(parts.PARTS, "a page") | {"kinds": []}
    monkeypatch.setattr(evidence, "defaults", lambda: {"sm90": row})
    monkeypatch.delenv("OPSET_CONFIG", raising=False)
    monkeypatch.delenv("OPSET_NATIVE", raising=False)
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")
    made = unprocessed(QWEN3, load_format="dummy", dtype="bfloat16")

    def changed(feature: str | None):
        example = EXAMPLES[feature] if feature else {}
        for name, value in example.items():
            if name.isupper():
                monkeypatch.setenv(name, value)
        return Changed(made, {path: value for path, value in example.items() if not path.isupper()})

    return changed


def test_every_rule_has_an_example_and_every_example_a_rule():
    features = {feature for name in parts.PARTS for which in RULES for feature in rules(name, which)}
    assert features == set(EXAMPLES), "add what turns a new rule on to EXAMPLES"


def test_without_any_of_these_every_part_serves(changed):
    made = changed(None)
    assert all(parts.decide(for_part(name, made), HOPPER)[name].on for name in parts.PARTS)


# The features that each part does not support, and the kinds for which it needs evidence. They are listed in full, so
# that a removed rule is noticed.
UNSUPPORTED = {
    "attention": (
        "another worker class", "another attention backend", "multi-head latent attention (MLA)",
        "multimodal prefix LMs (bidirectional attention within an image)",
        "encoders with a pooled KV cache (Voxtral Realtime)", "attention in chunks that look back (Rnj-1)",
        "windows of generated tokens (R-SWA)", "square-root ALiBi (Step1)",
        "a KV cache in a dtype other than the model's and fp8 e4m3", "KV connectors",
        "KV cache offloading", "decode context parallelism",
        "prefill context parallelism", "batch invariance", "tensor descriptors in vLLM's own Triton kernels",
    ),
    "sampler": (
        "another worker class", "pooling models", "speculative decoding", "fp64 sampling noise", "sampling masks",
        "watermarks", "diffusion models", "batch invariance", "FlashInfer's sampler",
    ),
    "linear": (
        "another worker class", "weight offloading", "another linear backend", "quantised weights of another process",
        "activations that vLLM's Marlin kernels quantise", "batch invariance",
    ),
    "ops": (
        "another worker class", "optimisation levels 1 and 3 without a mode of torch.compile",
        "passes of torch.compile without its mode", "batch invariance",
    ),
    "moe": (
        "another worker class", "models without experts", "another backend for experts", "adapters (LoRA)",
        "data parallelism", "prefill context parallelism", "dual batch overlap (DBO)",
        "balancing experts between workers (EPLB)", "returning the chosen experts", "simulated routing of experts",
        "activations that vLLM's Marlin kernels quantise", "weight offloading", "batch invariance",
    ),
}  # fmt: skip
DRAFTS = (
    "n-gram drafts",
    "drafts by a draft model",
    "drafts by EAGLE",
    "drafts by MTP",
    "drafts by other methods",
)
ENGINES = (
    "Mamba, state-space and linear attention", "encoder-decoder models", "multimodal models",
    "fp8 weights", "gpt-oss's MXFP4 weights", "weights in other quantised formats",
    "mixture-of-experts (MoE) models", "adapters (LoRA)",
    "tensor parallelism of 2", "tensor parallelism of more than 2", "pipeline parallelism", "data parallelism",
    "dual batch overlap (DBO)",
)  # fmt: skip
REPLACES_LAYERS = (*DRAFTS, *ENGINES, "pooling models", "multi-head latent attention (MLA)")
NOT_BY_DEFAULT = {
    "attention": (
        *DRAFTS, *ENGINES, "pooling models", "an fp8 KV cache", "soft-capped attention", "ALiBi",
        "layers with different head sizes (Gemma-4)", "fp32",
    ),
    "sampler": ENGINES,
    "linear": (*REPLACES_LAYERS, "fp32"),
    "ops": REPLACES_LAYERS,
    "moe": (
        *DRAFTS,
        "Mamba, state-space and linear attention", "encoder-decoder models",
        "multimodal models", "fp8 weights", "gpt-oss's MXFP4 weights", "weights in other quantised formats",
        "tensor parallelism of 2", "tensor parallelism of more than 2",
        "pipeline parallelism", "pooling models", "multi-head latent attention (MLA)", "expert parallelism", "fp32",
    ),
}  # fmt: skip


def _cases(features: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(name, feature) for name, of_part in features.items() for feature in of_part]


def test_the_sampler_is_on_where_vllm_would_sample_with_flashinfer_by_default(changed, monkeypatch, tmp_path):
    made = changed(None)
    (tmp_path / "flashinfer").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER")
    assert parts.decide(made, HOPPER)["sampler"].on


@pytest.mark.parametrize(("name", "feature"), _cases(UNSUPPORTED))
def test_what_a_part_does_not_do_is_left_to_vllm_and_refused_where_it_is_asked_for(name, feature, changed, monkeypatch):
    made = for_part(name, changed(feature))
    assert not parts.decide(made, HOPPER)[name].on
    monkeypatch.setenv("OPSET_NATIVE", f"{name}=on")
    with pytest.raises(Refusal):
        parts.decide(made, HOPPER)


@pytest.mark.parametrize(("name", "feature"), _cases(NOT_BY_DEFAULT))
def test_what_was_not_measured_to_be_faster_is_left_to_vllm(name, feature, changed, monkeypatch):
    made = for_part(name, changed(feature))
    assert not parts.decide(made, HOPPER)[name].on
    if feature not in UNSUPPORTED[name]:
        monkeypatch.setenv("OPSET_NATIVE", f"{name}=on")
        assert parts.decide(made, HOPPER)[name].on


# Evidence of a kind.

FASTER = {
    "part": "attention", "kind": "fp8 weights", "on": True, "model": "Qwen3-8B", "machine": "NVIDIA H200",
    "versions": "vLLM 0.26.0", "commit": "0123456", "data": None,
    "ratios": {"TPOT 1x1024/32": 0.9, "TTFT 8x8192/8": 1.0},
}  # fmt: skip
SLOWER = FASTER | {"on": False, "ratios": {"TPOT 1x1024/32": 0.95, "TTFT 8x8192/8": 1.25}}


@pytest.fixture
def measured(changed, monkeypatch):
    """`measured(*rows)`: these are the rows of evidence on Hopper GPUs."""

    def measured(*rows: dict) -> None:
        monkeypatch.setitem(evidence.defaults()["sm90"], "kinds", rows)

    return measured


@pytest.mark.parametrize(
    ("row", "on", "why"),
    [
        (FASTER, True, "faster by a page"),
        (SLOWER, False, "vLLM's own serves fp8 weights: Qwen3-8B took 0.950 to 1.250 of the time without the part"),
        (FASTER | {"part": "linear"}, False, "vLLM's own serves fp8 weights: not measured"),
        (FASTER | {"kind": "ALiBi"}, False, "vLLM's own serves fp8 weights: not measured"),
    ],
)
def test_evidence_decides_on_its_part_and_kind(row, on, why, changed, measured):
    made = changed("fp8 weights")
    assert not parts.decide(made, HOPPER)["attention"].on
    measured(row)
    assert parts.decide(made, HOPPER)["attention"] == (on, why)


def test_each_kind_of_a_configuration_needs_evidence(changed, measured):
    measured(FASTER)
    made = changed("fp8 weights")
    both = Changed(made._base, made._changes | EXAMPLES["an fp8 KV cache"])
    assert not parts.decide(both, HOPPER)["attention"].on
    measured(FASTER, FASTER | {"kind": "an fp8 KV cache"})
    assert parts.decide(both, HOPPER)["attention"].on


def test_evidence_is_of_its_gpus(changed, measured):
    measured(FASTER)
    assert evidence.of_kind("attention", "fp8 weights", HOPPER)
    assert not evidence.of_kind("attention", "fp8 weights", 100)


IN_USE = evidence.defaults


@pytest.mark.parametrize(
    ("kinds", "on"),
    [
        ((), {"attention", "sampler", "linear"}),
        (("mixture-of-experts (MoE) models",), {"attention", "sampler", "linear", "moe"}),
        (("mixture-of-experts (MoE) models", "fp8 weights"), {"attention", "moe"}),
        (("mixture-of-experts (MoE) models", "weights in other quantised formats"), {"attention"}),
        (("mixture-of-experts (MoE) models", "gpt-oss's MXFP4 weights"), {"attention", "sampler", "linear", "moe"}),
        (("mixture-of-experts (MoE) models", "expert parallelism"), {"attention", "sampler", "linear"}),
        (("mixture-of-experts (MoE) models", "tensor parallelism of 2"), {"attention"}),
        (("tensor parallelism of 2",), {"attention"}),
        (("tensor parallelism of more than 2",), set()),
        (("mixture-of-experts (MoE) models", "adapters (LoRA)"), set()),
        (("multimodal models",), {"attention"}),
        (("ALiBi",), {"attention", "sampler", "linear"}),
        (("drafts by a draft model",), {"attention"}),
        (("drafts by EAGLE",), {"attention"}),
        (("drafts by MTP",), {"attention"}),
        (("drafts by other methods",), set()),
        (("multimodal models", "multimodal prefix LMs (bidirectional attention within an image)"), set()),
        (("multimodal models", "encoders with a pooled KV cache (Voxtral Realtime)"), set()),
    ],
)
def test_the_parts_that_are_on_by_default(kinds, on, changed, monkeypatch):
    made = changed(None)
    monkeypatch.setattr(evidence, "defaults", IN_USE)
    found = parts.decide(Changed(made._base, {k: v for kind in kinds for k, v in EXAMPLES[kind].items()}), HOPPER)
    assert {name for name, part in found.items() if part.on} == on


def test_vllm_still_derives_pooling_backends_from_its_own_only():
    """When this fails, opset's attention may serve encoders with a pooled KV cache, and their rule can go."""
    from vllm.model_executor.models import whisper_causal

    from vllm_opset.attention.backend import OpsetAttentionBackend

    with pytest.raises(NotImplementedError, match="not yet supported"):
        whisper_causal.create_whisper_attention_backend_with_block_pooling(OpsetAttentionBackend, 4)
