"""vLLM's own CUDA platform with opset's parts: when it is chosen, which parts serve, and the messages to users."""

import functools
import itertools
import json
import operator
import re
import statistics
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from readme import ROOT
from small_models import QWEN3
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_opset import platform
from vllm_opset.attention import BACKEND
from vllm_opset.kernel import REFERENCE
from vllm_opset.platform import stock
from vllm_opset.platform.cuda import device
from vllm_opset.platform.native import evidence, parts
from vllm_opset.platform.refusals import Refusal, check_graphs
from vllm_opset.selection import OverrideError

pytestmark = pytest.mark.window

HOPPER, TURING = 90, 75
# The parts that a model without experts, as in these configurations, can have.
DENSE = tuple(part for part in parts.PARTS if part != "moe")
NATIVE = "vllm_opset.platform.OpsetNativePlatform"

# When the platform is chosen.


@pytest.fixture
def machine(monkeypatch):
    """`machine("cuda", compiled=True)`: the device that PyTorch finds, and whether vLLM has its kernels for NVIDIA
    GPUs.
    """

    def machine(accelerator: str | None, compiled: bool) -> None:
        monkeypatch.setattr(platform, "_accelerator", lambda: accelerator)
        monkeypatch.setattr(platform, "_is_found", lambda accelerator: True)
        monkeypatch.setattr(platform, "_why_no_gpu", lambda choice: None)
        monkeypatch.setattr(stock, "_has", lambda module: compiled and module == "_C_stable_libtorch")

    return machine


@pytest.mark.parametrize(
    ("accelerator", "compiled", "choice", "answer"),
    [
        ("cuda", True, "auto", NATIVE),
        ("cuda", True, "native", NATIVE),
        ("cuda", True, "cuda", "vllm_opset.platform.OpsetCudaPlatform"),
        ("cuda", True, "cpu", "vllm_opset.platform.OpsetCpuPlatform"),
        ("cuda", True, "off", None),
        ("cuda", False, "auto", "vllm_opset.platform.OpsetCudaPlatform"),
        (None, True, "auto", "vllm_opset.platform.OpsetCpuPlatform"),
        ("rocm", True, "auto", None),
    ],
)
def test_choice(accelerator, compiled, choice, answer, machine, monkeypatch):
    machine(accelerator, compiled)
    monkeypatch.setenv("OPSET_PLATFORM", choice)
    # vLLM asks twice.
    assert [platform.activate(), platform.activate()] == [answer, answer]


def test_asked_for_without_compiled_kernels_is_an_error_with_the_cure(machine, monkeypatch):
    machine("cuda", compiled=False)
    monkeypatch.setenv("OPSET_PLATFORM", "native")
    assert platform.activate() == "vllm_opset.platform.Unusable"
    with pytest.raises(platform.PluginError, match=r"this vLLM has no compiled kernels.*OPSET_PLATFORM=cuda does"):
        _ = platform.Unusable


# Which parts serve.


@pytest.fixture
def config(unprocessed, monkeypatch):
    """`config(**arguments)`: a configuration before vLLM's platform has processed it."""
    monkeypatch.delenv("OPSET_NATIVE", raising=False)
    monkeypatch.delenv("OPSET_CONFIG", raising=False)

    def config(**changes):
        made = unprocessed(QWEN3, load_format="dummy", dtype="bfloat16")
        for path, value in changes.items():
            *parts_of, name = path.split("__")
            # This bypasses the checks of pydantic, which would require other settings as well.
            object.__setattr__(functools.reduce(getattr, parts_of, made), name, value)
        return made

    return config


@pytest.fixture
def everything_is_faster(monkeypatch):
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")
    monkeypatch.setattr(evidence, "defaults", lambda: {"sm90": dict.fromkeys(parts.PARTS, "a page")})


def on(config, family: int = HOPPER) -> set[str]:
    return {name for name, part in parts.decide(config, family).items() if part.on}


def test_the_table_is_well_formed():
    for family, row in evidence.defaults().items():
        assert family.startswith("sm") and divmod(int(family.removeprefix("sm")), 10) >= device.OLDEST
        assert set(row) == {*parts.PARTS, "kinds"}
        assert all(row[part] is None or (ROOT / row[part]).exists() for part in parts.PARTS)


# The cases in which the default parts are behind stock. Llama-3.2-1B has two runs, of 21,460 and 22,389 tokens/s, and
# stock 20,890 and 23,247. The others have one run. Seven tokens decide the TPOT of 8 prompts of 8,192 tokens, so it
# differs by up to 1.6x between runs of one engine. docs/benchmarks/README.md lists all.
SLOWER = {"output tokens/s": {("Qwen3-8B in block fp8", "8x8192/8")}, "TPOT, ms": set()}


@pytest.mark.parametrize("row", evidence.defaults().values(), ids=evidence.defaults().keys())
def test_what_is_on_by_default_was_measured_to_be_faster(row):
    """The results name the parts that are on by default. Engines are slower with them in the cases of SLOWER alone."""
    # Experts have a page of their own: tests/platform/cuda/test_evidence.py tests the part for them.
    (page,) = {row[part] for part in parts.PARTS if part != "moe"} - {None}
    results = (ROOT / page).with_suffix(".json").read_text()
    (named,) = re.findall(r"native is vLLM with opset's parts of that time: ([a-z, ]+)\.", results)
    assert set(re.split(", | and ", named)) == {part for part in parts.PARTS if row[part]} - {"moe"}
    ratios = _to_stock(json.loads(results))
    for quantity, behind in (("output tokens/s", operator.lt), ("TPOT, ms", operator.gt)):
        of_quantity = ratios[quantity]
        assert len(of_quantity) >= 5
        assert {case for case, ratio in of_quantity.items() if behind(ratio, 1)} == SLOWER[quantity]


def _to_stock(runs: list[dict]) -> dict[str, dict[tuple[str, str], float]]:
    """By quantity, then by model and case, the engine "native" to stock vLLM. A later run of a case counts alone."""
    ratios: dict[str, dict[tuple[str, str], float]] = {}
    for run in runs:
        medians = {
            (result["engine"], result["case_name"], quantity): statistics.median(values)
            for result in run["results"]
            for quantity, values in result["metrics"].items()
        }
        for (engine, case, quantity), median in medians.items():
            if engine == "native" and ("stock", case, quantity) in medians:
                of_quantity = ratios.setdefault(quantity, {})
                of_quantity[run["shape"]["name"], case] = round(median / medians["stock", case, quantity], 3)
    return ratios


def test_by_default_the_table_says(config, everything_is_faster):
    decisions = parts.decide(config(), HOPPER)
    assert {name: part.why for name, part in decisions.items() if part.on} == dict.fromkeys(DENSE, "faster by a page")


def test_what_is_said_of_a_model_that_every_part_can_do(everything_is_faster, monkeypatch):
    monkeypatch.setenv("OPSET_NATIVE", "sampler=off")
    decisions = parts.decide_without_model(HOPPER)
    assert decisions["sampler"] == (False, "switched off by OPSET_NATIVE")
    assert decisions["attention"] == (True, "faster by a page")


def test_a_family_that_was_not_measured_has_nothing_on(config, everything_is_faster):
    decisions = parts.decide(config(), 100)
    assert {part for part in decisions.values()} == {
        (False, "not measured to be faster on GPUs of compute capability 10.0")
    }


@pytest.mark.parametrize("source", ["OPSET_NATIVE", "OPSET_CONFIG", "--additional-config"])
@pytest.mark.parametrize("word", ["off", "on"])
def test_users_say_otherwise(source, word, config, everything_is_faster, monkeypatch, tmp_path):
    changes = {}
    if source == "OPSET_NATIVE":
        monkeypatch.setenv("OPSET_NATIVE", f"sampler={word}")
    elif source == "OPSET_CONFIG":
        (tmp_path / "opset.yaml").write_text(f"native: {{sampler: {word}}}")
        monkeypatch.setenv("OPSET_CONFIG", str(tmp_path / "opset.yaml"))
    else:
        changes["additional_config"] = {"opset": {"native": {"sampler": word}}}
    sampler = parts.decide(config(**changes), HOPPER)["sampler"]
    assert sampler.on == (word == "on") and source in sampler.why


def test_attention_backends_that_users_name(config, everything_is_faster):
    named = parts.decide(config(attention_config__backend=AttentionBackendEnum.CUSTOM), 100)["attention"]
    assert named == (True, "asked for by --attention-backend CUSTOM")
    other = parts.decide(config(attention_config__backend=AttentionBackendEnum.FLASH_ATTN), HOPPER)["attention"]
    assert other == (False, "vLLM's own serves another attention backend")


def test_a_backend_and_a_switch_of_attention_that_contradict_each_other_are_refused(config, monkeypatch):
    monkeypatch.setenv("OPSET_NATIVE", "attention=off")
    with pytest.raises(Refusal, match="CUSTOM asks for vllm-opset's attention, and OPSET_NATIVE switches it off"):
        parts.decide(config(attention_config__backend=AttentionBackendEnum.CUSTOM), HOPPER)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_config__flash_attn_version": 3},
        {"attention_config__use_trtllm_attention": True},
        {"attention_config__flash_attn_max_num_splits_for_cuda_graph": 16},
        {"attention_config__flash_attn_max_num_splits_for_cuda_graph": 0},
        {"attention_config__backend_per_kind": {"sliding_window": AttentionBackendEnum.TRITON_ATTN}},
    ],
)
def test_attention_that_users_name_in_other_words_stays(changes, config, everything_is_faster):
    assert "attention" not in on(config(**changes))
    with pytest.raises(Refusal, match=r"another attention backend: leave out .*--attention-config"):
        parts.decide(config(attention_config__backend=AttentionBackendEnum.CUSTOM, **changes), HOPPER)


@pytest.mark.parametrize(
    ("has_sink", "asked", "ours"), [(False, False, True), (True, False, False), (True, True, True)]
)
def test_layers_with_sinks_are_left_to_vllm_unless_the_part_is_asked_for(
    has_sink, asked, ours, config, everything_is_faster, attention_of
):
    made = config(**({"attention_config__backend": AttentionBackendEnum.CUSTOM} if asked else {}))
    parts.decide_once(made, HOPPER)
    assert attention_of(made, has_sink=has_sink) == (BACKEND if ours else "vLLM's")


NOT_COVERED = {
    "attention": {"parallel_config__decode_context_parallel_size": 2},
    "sampler": {"model_config__use_fp64_gumbel": True},
    "linear": {"offload_config__uva__cpu_offload_gb": 4.0},
    "ops": {"parallel_config__worker_cls": "another.Worker"},
}


@pytest.mark.parametrize("part", NOT_COVERED)
def test_what_is_not_covered_is_left_to_vllm_by_default(part, config, everything_is_faster):
    decisions = parts.decide(config(**NOT_COVERED[part]), HOPPER)
    assert not decisions[part].on and decisions[part].why.startswith("vLLM's own serves ")
    others = set() if part == "ops" else set(DENSE) - {part}  # no part serves in another worker
    assert on(config(**NOT_COVERED[part])) == others


@pytest.mark.parametrize(
    "changes",
    [
        {"cache_config__kv_offloading_size": 1.0},
        {"cache_config__cache_dtype": "float16"},  # the model is in bfloat16
        {"parallel_config__worker_cls": "another.Worker"},
    ],
)
def test_attention_is_not_offered_where_it_would_be_without_its_worker_or_its_cache(
    changes, config, everything_is_faster, monkeypatch
):
    assert "attention" not in on(config(**changes))
    monkeypatch.setenv("OPSET_NATIVE", "attention=on")
    with pytest.raises(Refusal, match=r"vllm-opset \(attention\)"):
        parts.decide(config(**changes), HOPPER)


@pytest.mark.parametrize(
    "changes",
    [
        {"cache_config__cache_dtype": "fp8"},
        {"model_config__dtype": torch.float32},
        {"model_config__multimodal_config": object()},
        {"model_config__hf_text_config__attn_logit_softcapping": 50.0},
    ],
)
def test_attention_that_was_not_measured_is_had_by_asking(changes, config, everything_is_faster, monkeypatch):
    assert "attention" not in on(config(**changes))
    monkeypatch.setenv("OPSET_NATIVE", "attention=on")
    assert "attention" in on(config(**changes))


@pytest.mark.parametrize("part", NOT_COVERED)
def test_what_is_not_covered_but_asked_for_is_refused(part, config, monkeypatch):
    monkeypatch.setenv("OPSET_NATIVE", f"{part}=on")
    with pytest.raises(Refusal, match=rf"vllm-opset \({part}\) on vLLM's own CUDA platform does not support .*: "):
        parts.decide(config(**NOT_COVERED[part]), HOPPER)


# Only one GPU, dense language models and unquantised weights were compared with stock vLLM. These were not.
NOT_COMPARED = [
    {"parallel_config__tensor_parallel_size": 2},
    {"parallel_config__pipeline_parallel_size": 2},
    {"parallel_config__data_parallel_size": 2},
    {"parallel_config__enable_dbo": True},
    {"parallel_config__ubatch_size": 2},
    {"model_config__quantization": "fp8"},
    {"model_config__model_arch_config__num_experts": 8},
    {"lora_config": object()},
]


@pytest.mark.parametrize(
    ("part", "changes"),
    [*itertools.product(DENSE, NOT_COMPARED), ("linear", {"model_config__dtype": torch.float32})],
)
def test_what_is_not_measured_can_be_asked_for(part, changes, config, everything_is_faster, monkeypatch):
    assert part not in on(config(**changes))
    monkeypatch.setenv("OPSET_NATIVE", f"{part}=on")
    assert part in on(config(**changes))


def test_users_linear_backends_stay(config, everything_is_faster):
    assert on(config(kernel_config__linear_backend="cutlass")) == set(DENSE) - {"linear"}


@pytest.mark.parametrize(
    ("part", "variable"), [("sampler", "VLLM_USE_FLASHINFER_SAMPLER"), ("attention", "VLLM_TRITON_USE_TD")]
)
def test_kernels_that_users_name_by_a_variable_stay(part, variable, config, everything_is_faster, monkeypatch):
    made = config()
    monkeypatch.setenv(variable, "0")
    assert on(made) == set(DENSE)
    monkeypatch.setenv(variable, "1")
    assert on(made) == set(DENSE) - {part}
    monkeypatch.setenv("OPSET_NATIVE", f"{part}=on")
    with pytest.raises(Refusal, match=f"unset {variable}"):
        parts.decide(made, HOPPER)


@pytest.mark.parametrize(
    ("choice", "refused"), [("linear=reference", False), ("rms_norm=reference", True), ("rms_norm=triton", False)]
)
def test_graphs_capture_no_reference_that_may_read_lengths(choice, refused):
    op, kernel = choice.split("=")
    provider = REFERENCE if kernel == "reference" else kernel
    made = SimpleNamespace(op=op, kernel=SimpleNamespace(provider=provider))
    with pytest.raises(Refusal, match=f"reference of {op} cannot be captured") if refused else nullcontext():
        check_graphs([made])


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle", "eagle3", "mtp"])
def test_drafts_have_vllms_own_sampler_and_linear_layers(method, config):
    assert on(config(speculative_config=SimpleNamespace(method=method))) == {"attention"}


def test_drafts_that_were_not_measured_have_vllms_own_attention_too(config):
    assert on(config(speculative_config=SimpleNamespace(method="medusa"))) == set()


def test_an_older_gpu_is_refused(config, monkeypatch):
    monkeypatch.setenv("OPSET_NATIVE", "attention=on")
    with pytest.raises(Refusal, match=r"attention needs a GPU of compute capability 8\.0"):
        parts.decide(config(), TURING)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("atention=on", "OPSET_NATIVE: unknown part 'atention'; did you mean 'attention'?"),
        ("attention=yes", "OPSET_NATIVE: attention is on or off, not 'yes'"),
        ("attention", "OPSET_NATIVE: 'attention' is not of the form part=on"),
    ],
)
def test_wrong_words_are_errors(words, message, config, monkeypatch):
    made = config()
    monkeypatch.setenv("OPSET_NATIVE", words)
    with pytest.raises(OverrideError) as error:
        parts.decide(made, HOPPER)
    assert str(error.value) == message
