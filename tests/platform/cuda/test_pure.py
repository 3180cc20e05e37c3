"""The platform for GPUs without vLLM's compiled kernels, as far as it can be tested without a GPU."""

import functools
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from small_models import LLAMA
from vllm.config import CompilationMode

from vllm_opset.platform import multimodal
from vllm_opset.platform.cuda.refusals import EARLY_RULES, RULES, WITH_IMAGES
from vllm_opset.platform.drafts import KINDS
from vllm_opset.platform.quantised_weights import FP8_OF_GPT_OSS, QUANTISED_WEIGHTS
from vllm_opset.platform.refusals import RULES as COMMON
from vllm_opset.platform.refusals import Refusal, check, fusions

pytestmark = pytest.mark.window
# Rules that some platforms share.
SHARED = (QUANTISED_WEIGHTS, FP8_OF_GPT_OSS)


@pytest.fixture
def config(configure):
    """A configuration that this machine's platform has made. The platform for GPUs treats it as complete."""
    from vllm_opset.platform.cuda.platform import OpsetCudaPlatform

    config = configure(LLAMA)
    config.parallel_config.worker_cls = OpsetCudaPlatform.worker
    return config


def drafts(method: str, quantization: str | None = None, **settings: str) -> SimpleNamespace:
    """A speculative configuration."""
    return SimpleNamespace(method=method, draft_model_config=SimpleNamespace(quantization=quantization), **settings)


FP8 = {"model_config.quantization": "fp8"}
MXFP4 = {"model_config.quantization": "gpt_oss_mxfp4"}
REFUSED = [
    ("speculative decoding by another method", {"speculative_config": SimpleNamespace(method="dflash")}),
    ("a model that drafts with vLLM's first model runner", {"speculative_config": drafts("eagle")}),
    ("a model that drafts with quantised weights of its own", {"speculative_config": drafts("mtp", "fp8")}),
    ("another backend or LM head for", {"speculative_config": drafts("eagle", attention_backend="FLASH_ATTN")}),
    ("other than fp8 e4m3 for a model that drafts", {"speculative_config": drafts("mtp", kv_cache_dtype="fp8_e5m2")}),
    ("a KV cache in a dtype other than the model's and fp8 e4m3", {"cache_config.cache_dtype": "fp8_e5m2"}),
    ("weight offloading by a view", {"offload_config.uva.cpu_offload_gb": 4.0}),
    ("quantised weights with the method quark", {"model_config.quantization": "quark"}),
    ("MXFP4 weights in a model", {**MXFP4, "model_config.dtype": torch.float32}),
    ("offloading of quantised weights", {**FP8, "offload_config.prefetch.offload_group_size": 2}),
]


@pytest.mark.parametrize(("feature", "changes"), REFUSED)
def test_what_is_not_done_is_refused(feature, changes, config, monkeypatch):
    check(RULES, config, "here")
    monkeypatch.setattr(type(config), "use_v2_model_runner", "first model runner" not in feature)
    for attribute, value in changes.items():
        *path, name = attribute.split(".")
        object.__setattr__(functools.reduce(getattr, path, config), name, value)
    with pytest.raises(Refusal, match=feature):
        check(RULES, config, "here")


OWN_WITH_EXPERTS = [
    ("adapters (LoRA) for mixtures of experts", "lora_config", object()),
    ("offloading the weights of mixtures of experts", "offload_config.prefetch.offload_group_size", 2),
]
COMMON_WITH_EXPERTS = [
    ("quantised weights with the method quark", "model_config.quantization", "quark"),
]


@pytest.mark.parametrize(("feature", "attribute", "value"), [*OWN_WITH_EXPERTS, *COMMON_WITH_EXPERTS])
def test_mixtures_of_experts_are_served_as_far_as_the_kernels_go(feature, attribute, value, config, monkeypatch):
    monkeypatch.setattr(type(config.model_config), "is_moe", True)
    check(RULES, config, "here")
    *path, name = attribute.split(".")
    object.__setattr__(functools.reduce(getattr, path, config), name, value)
    with pytest.raises(Refusal, match=re.escape(feature)):
        check(RULES, config, "here")


def test_every_rule_of_its_own_is_tested():
    own = {rule.feature for rule in RULES if rule not in (*COMMON, *SHARED, *multimodal.RULES, *WITH_IMAGES)}
    tried = [feature for feature, *_ in (*REFUSED, *OWN_WITH_EXPERTS) if "the method" not in feature]
    assert all(any(feature in rule for feature in tried) for rule in own) and len(own) == len(tried)


@pytest.mark.parametrize("method", KINDS)
def test_these_methods_draft(method, config, monkeypatch):
    monkeypatch.setattr(type(config), "use_v2_model_runner", True)
    config.speculative_config = drafts(method)
    check(RULES, config, "here")


@pytest.mark.parametrize("quantisation", [FP8, MXFP4])
def test_fp8_and_mxfp4_weights_are_served(quantisation, config):
    config.model_config.quantization = quantisation["model_config.quantization"]
    config.model_config.dtype = torch.bfloat16
    check(RULES, config, "here")


@pytest.fixture
def asked(configure, monkeypatch):
    """`asked(**arguments)`: applies that platform's checks of user settings; this machine's platform completes the
    rest.
    """
    from vllm_opset.platform.cpu.platform import OpsetCpuPlatform

    def asked(**arguments):
        monkeypatch.setattr(OpsetCpuPlatform, "early_rules", EARLY_RULES)
        monkeypatch.setattr(OpsetCpuPlatform, "rules", ())
        return configure(LLAMA, **arguments)

    return asked


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        ({"compile_sizes": [1]}, "torch.compile without a mode.* leave out --compilation-config.compile_sizes"),
        ({"compile_sizes": [1], "mode": 3}, None),
        ({"cudagraph_capture_sizes": [1]}, None),
        ({"pass_config": {"fuse_norm_quant": True}, "mode": 3}, "passes that fuse into vLLM's compiled kernels"),
    ],
)
def test_settings_of_the_compiler_need_its_mode(arguments, refused, asked):
    with pytest.raises(Refusal, match=refused) if refused else nullcontext():
        asked(compilation_config=arguments)


@pytest.mark.parametrize("mode", [None, 3])
def test_a_level_that_asks_for_a_compiler_needs_its_mode(mode, asked):
    with pytest.raises(Refusal, match="leave out --optimization-level") if mode is None else nullcontext():
        asked(optimization_level=3, compilation_config={"mode": mode})


def test_no_pass_fuses_into_compiled_kernels(config):
    from vllm_opset.platform.cuda.passes import OpsetPassManager
    from vllm_opset.platform.cuda.platform import OpsetCudaPlatform

    compilation = config.compilation_config
    object.__setattr__(compilation, "mode", CompilationMode.VLLM_COMPILE)
    object.__setattr__(compilation, "use_inductor_graph_partition", True)
    for name in fusions(config):
        object.__setattr__(compilation.pass_config, name, None)
    OpsetCudaPlatform.apply_config_platform_defaults(config)
    assert {getattr(compilation.pass_config, name) for name in fusions(config)} == {False}
    OpsetPassManager().configure(config)


def test_an_fp8_cache_is_not_refused(config):
    object.__setattr__(config.cache_config, "cache_dtype", "fp8")
    check(RULES, config, "here")


def test_compiled_graphs_of_other_platforms_are_not_taken_for_ours(config):
    ours = config.compute_hash()
    object.__setattr__(config, "additional_config", {})
    assert config.compute_hash() != ours


@pytest.mark.parametrize(
    ("asked", "runner", "graphs", "custom_ops"),
    [
        (None, "generate", "FULL_AND_PIECEWISE", ["all"]),
        # Full graphs cannot capture pooling models.
        (None, "pooling", "NONE", ["all"]),
        # A compiler traces vLLM's own code, and vLLM chooses the graphs.
        (3, "generate", None, []),
    ],
)
def test_defaults(asked, runner, graphs, custom_ops, config):
    from vllm_opset.platform.cuda.platform import OpsetCudaPlatform

    compilation = config.compilation_config
    mode = None if asked is None else CompilationMode(asked)
    for name, value in (("mode", mode), ("cudagraph_mode", None), ("custom_ops", [])):
        object.__setattr__(compilation, name, value)
    object.__setattr__(config.model_config, "runner_type", runner)
    OpsetCudaPlatform.apply_config_platform_defaults(config)
    assert compilation.mode == (CompilationMode.NONE if asked is None else mode)
    assert getattr(compilation.cudagraph_mode, "name", None) == graphs
    assert compilation.custom_ops == custom_ops


def test_the_lowest_level_captures_nothing(config):
    from vllm.config.vllm import OptimizationLevel

    from vllm_opset.platform.cuda.platform import OpsetCudaPlatform

    object.__setattr__(config, "optimization_level", OptimizationLevel.O0)
    object.__setattr__(config.compilation_config, "cudagraph_mode", None)
    OpsetCudaPlatform.apply_config_platform_defaults(config)
    assert config.compilation_config.cudagraph_mode.name == "NONE"


def test_a_weak_reference_is_the_same_memory_and_does_not_keep_it():
    from vllm_opset.platform import compat

    tensor = torch.arange(24.0).view(4, 6)[1:, ::2]
    weak = compat._weak_ref_tensor(tensor)
    assert torch.equal(weak, tensor) and weak.stride() == tensor.stride()
    assert weak.data_ptr() == tensor.data_ptr()
    weak += 1
    assert torch.equal(weak, tensor)


def test_vllms_warm_up_comes_back():
    from vllm.v1.worker import gpu_worker

    from vllm_opset.platform import compat

    original, calls = gpu_worker.kernel_warmup, []
    with compat.own_warm_up(calls.append):
        gpu_worker.kernel_warmup("worker")
    assert calls == ["worker"] and gpu_worker.kernel_warmup is original
