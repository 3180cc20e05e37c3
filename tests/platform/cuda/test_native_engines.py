"""The decisions on opset's parts hold for an engine: for its draft model, its workers and no other engine."""

import pickle
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from readme import ROOT
from small_models import GPT_OSS, QWEN3
from transformers import Gemma4TextConfig
from vllm.config import replace, set_current_vllm_config
from vllm.config.speculative import SpeculativeConfig
from vllm.model_executor.models import config as models
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_opset import ops
from vllm_opset.attention import BACKEND
from vllm_opset.platform import overridden
from vllm_opset.platform.bridges import has
from vllm_opset.platform.native import parts
from vllm_opset.platform.refusals import Refusal

pytestmark = pytest.mark.window


@pytest.fixture
def engine(configure, native, on_a_gpu, monkeypatch):
    """`engine(**arguments)`: the configuration of an engine on stock vLLM, as on a Hopper GPU."""
    monkeypatch.delenv("OPSET_NATIVE", raising=False)
    monkeypatch.delenv("OPSET_CONFIG", raising=False)
    on_a_gpu(native)
    return lambda **arguments: configure(QWEN3, dtype="bfloat16", **arguments)


def draft_of(config):
    """The configuration that vLLM makes for a draft model: a copy without the engine's parallelism and worker."""
    parallel = SpeculativeConfig.create_draft_parallel_config(config.parallel_config, 1)
    return replace(config, parallel_config=parallel)


def test_a_draft_model_has_opsets_attention_where_the_engine_has_it(engine, attention_of):
    config = engine(additional_config={"mine": 1})
    assert attention_of(config) == attention_of(draft_of(config)) == BACKEND
    assert config.additional_config["mine"] == 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"worker_cls": "another.Worker"},
        {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
    ],
)
def test_a_draft_model_has_vllms_attention_where_the_engine_has_it(arguments, engine, attention_of):
    config = engine(**arguments)
    assert attention_of(config) == attention_of(draft_of(config)) == "vLLM's"


def test_a_worker_in_another_process_has_the_parts_of_the_engine(engine):
    """vLLM tells an engine of several with a dense model that it is alone."""
    config = engine(pipeline_parallel_size=2, distributed_executor_backend="mp")
    config.parallel_config.pipeline_parallel_size = 1
    assert parts.decide(config, 90)["attention"].on
    assert parts.kept(pickle.loads(pickle.dumps(config))) == {}
    assert parts.kept(pickle.loads(pickle.dumps(engine()))) == {"attention": False, "sampler": False, "linear": False}


def test_another_attention_of_a_draft_model_is_vllms(engine, attention_of):
    config = engine()
    assert attention_of(config, AttentionBackendEnum.TRITON_ATTN) == "vLLM's"
    assert attention_of(config, AttentionBackendEnum.CUSTOM) == BACKEND


@pytest.mark.parametrize("of_the_engine", [AttentionBackendEnum.CUSTOM, AttentionBackendEnum.FLASH_ATTN])
def test_a_draft_model_has_opsets_attention_only_with_that_of_the_engine(of_the_engine, unprocessed):
    config = unprocessed(QWEN3, load_format="dummy", dtype="bfloat16")
    drafts = SimpleNamespace(method="draft_model", attention_backend=AttentionBackendEnum.CUSTOM)
    object.__setattr__(config, "speculative_config", drafts)
    config.attention_config.backend = of_the_engine
    if of_the_engine == AttentionBackendEnum.CUSTOM:
        assert parts.decide_once(config, 90)["attention"].on
    else:
        with pytest.raises(
            Refusal, match="asks for vllm-opset's attention for the draft model alone: give --attention-"
        ):
            parts.decide_once(config, 90)


def test_a_second_engine_of_a_process_has_its_own_attention(engine, monkeypatch):
    from vllm.platforms.cuda import CudaPlatform
    from vllm.v1.attention.selector import get_attn_backend

    from vllm_opset.platform.native import platform

    of_vllm = "vllm.v1.attention.backend.AttentionBackend"  # one that loads everywhere
    monkeypatch.setattr(platform, "_why_not", lambda *_: [])
    monkeypatch.setattr(CudaPlatform, "get_attn_backend_cls", classmethod(lambda *_, **__: of_vllm))
    chosen = []
    for switch in ("on", "off", "on"):
        config = engine(additional_config={"opset": {"native": {"attention": switch}}})
        with set_current_vllm_config(config):
            backend = get_attn_backend(head_size=64, dtype=torch.bfloat16, kv_cache_dtype="auto", num_heads=8)
        chosen.append(f"{backend.__module__}.{backend.__qualname__}")
    assert chosen == [BACKEND, of_vllm, BACKEND]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], ["all"]),
        (["+quant_fp8"], ["+quant_fp8", "all"]),  # as vLLM gives it for fp8 weights by blocks
        (["none", "+rms_norm"], ["none", "+rms_norm"]),
    ],
)
def test_torch_compile_sees_opsets_layers_unless_users_switch_them_off(given, expected, engine):
    compilation = {"mode": 3, "backend": "inductor", "custom_ops": given}
    config = engine(compilation_config=compilation, additional_config={"opset": {"native": {"ops": "on"}}})
    assert config.compilation_config.custom_ops == expected


@pytest.fixture
def gemma4(configure, native, on_a_gpu, monkeypatch):
    """`gemma4(has_fa4, **arguments)`: the configuration of a model whose layers differ in head size, on stock vLLM.

    has_fa4: whether vLLM has FlashAttention 4.
    """
    if not has("vllm.config.model_arch.ModelArchitectureConfig.__getitem__")():
        pytest.skip("vLLM up to 0.27 reads no such model: ends when 0.28 is the oldest supported release")
    monkeypatch.delenv("OPSET_NATIVE", raising=False)
    monkeypatch.delenv("OPSET_CONFIG", raising=False)
    layers = {"layer_types": ["sliding_attention", "full_attention"], "per_layer_config": {"01": {"head_dim": 64}}}
    model = Gemma4TextConfig(**layers, num_hidden_layers=2, head_dim=32, architectures=["Gemma4ForCausalLM"]).to_dict()
    configure(model)  # reads the model's class, which the other platform could not import here
    on_a_gpu(native)

    def gemma4(has_fa4: bool, **arguments):
        monkeypatch.setattr(fa_utils, "is_fa_version_supported", lambda *_, **__: has_fa4)
        return configure(model, dtype="bfloat16", **arguments)

    return gemma4


@pytest.mark.parametrize(("has_fa4", "backend", "version"), [(True, None, 4), (False, "TRITON_ATTN", None)])
def test_the_attention_that_vllm_sets_for_a_model_stays_where_the_part_is_off(has_fa4, backend, version, gemma4):
    ours = gemma4(has_fa4, additional_config={"opset": {"native": {"attention": "on"}}})
    assert "attention" in parts.kept(ours)
    assert (ours.attention_config.backend, ours.attention_config.flash_attn_version) == (None, None)
    theirs = gemma4(has_fa4)
    assert "attention" not in parts.kept(theirs)
    assert getattr(theirs.attention_config.backend, "name", None) == backend
    assert theirs.attention_config.flash_attn_version == version


def test_the_attention_that_a_user_sets_stays(gemma4):
    attention = gemma4(has_fa4=False, attention_backend="FLASH_ATTN")
    assert "attention" not in parts.kept(attention) and attention.attention_config.backend.name == "FLASH_ATTN"


def test_windows_of_generated_tokens_have_the_attention_that_vllm_sets_for_them(engine, monkeypatch):
    """Another version of FlashAttention would leave the windows out. Unlimited-OCR itself imports torchvision."""

    class OfUnlimitedOcr(models.VerifyAndUpdateConfig):
        verify_and_update_config = models.UnlimitedOCRForCausalLMConfig.verify_and_update_config

    monkeypatch.setattr(fa_utils, "is_fa_version_supported", lambda *_, **__: True)
    monkeypatch.setitem(models.MODELS_CONFIG_MAP, "Qwen3ForCausalLM", OfUnlimitedOcr)
    config = engine(hf_overrides={"rswa_window": 128})
    assert "attention" not in parts.kept(config)
    attention = config.attention_config
    assert (attention.backend, attention.flash_attn_version) == (AttentionBackendEnum.FLASH_ATTN, 4)


def test_the_captured_steps_that_vllm_sets_for_gpt_oss_stay(configure, native, on_a_gpu):
    """Opset's attention was measured with them."""
    configure(GPT_OSS)  # reads the model's class, which the other platform could not import here
    on_a_gpu(native)
    config = configure(GPT_OSS, dtype="bfloat16", max_num_seqs=512, max_num_batched_tokens=8192)
    assert config.compilation_config.max_cudagraph_capture_size == 1024


# Overrides of ops that vLLM's own code computes.


@pytest.fixture
def warnings(native, monkeypatch):
    """What the platform warns of."""
    said = []
    monkeypatch.setattr(sys.modules[native.__module__].logger, "warning_once", said.append)
    return said


@pytest.mark.parametrize(
    ("kernel", "native_parts", "named"),
    [
        ("rms_norm=reference", {}, "ops"),
        ("rms_norm=reference", {"ops": "on"}, None),
        ("linear=reference", {}, None),
        ("linear=reference", {"linear": "off"}, "linear"),
        ("rope_cache=reference", {"ops": "off", "attention": "off"}, "attention, ops"),
    ],
)
def test_an_override_of_an_op_whose_part_is_off_is_warned_of(
    kernel, native_parts, named, engine, warnings, monkeypatch
):
    monkeypatch.setenv("OPSET_KERNELS", kernel)
    engine(enforce_eager=True, additional_config={"opset": {"native": native_parts}})
    assert len(warnings) == (0 if named is None else 1), warnings
    if named is not None:
        assert f"OPSET_KERNELS asks for {kernel}, which has no effect: " in warnings[0]
        switches = named.replace(", ", "=on,") + "=on"
        assert f"parts of vllm-opset are off: {named}. Switch them on by OPSET_NATIVE={switches}, or" in warnings[0]


def test_an_override_of_an_op_for_which_no_part_chooses_a_kernel_is_warned_of(engine, warnings):
    engine(additional_config={"opset": {"kernels": {"apply_penalties": "reference"}}})
    (warning,) = warnings
    assert "apply_penalties=reference, which has no effect: no part of vllm-opset chooses a kernel" in warning


def test_the_ops_that_need_the_part_for_them_are_those_of_its_layers():
    """The part `ops` builds layers, and fuses them."""
    model = ROOT / "vllm_opset" / "model"
    text = "".join((model / f"{module}.py").read_text() for module in ("registration", "layers", "fusion"))
    in_layers = {op for op in ops.ALL if re.search(rf"\bops\.{op.name}\b", text)}
    assert in_layers == {op for op in ops.ALL if "ops" in overridden.NEEDED.get(op, ("ops",))}
