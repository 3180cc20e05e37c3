"""Every setting, argument and variable of vLLM is honoured, refused or has no meaning here, as the tables say.

A new one in a new release fails these tests until someone has reviewed it.
"""

import copy
import functools
import importlib
import re
from importlib.metadata import version
from pathlib import Path

import pytest
import settings_table
from settings_table import ALL, PLATFORMS, another, classes, entries, entry, settings, table
from small_models import LLAMA

from vllm_opset.platform import runners
from vllm_opset.platform.refusals import Refusal, check

pytestmark = pytest.mark.window

WHERE = "on this platform"
MAKEFILE = Path(__file__).parents[2] / "Makefile"


@pytest.fixture
def rules_of(monkeypatch):
    """`rules_of("npu")`: from now on that platform's rules check configurations, and this platform completes them."""
    from vllm_opset.platform.cpu.platform import OpsetCpuPlatform

    def rules_of(platform: str):
        module = importlib.import_module(f"vllm_opset.platform.{platform}.refusals")
        monkeypatch.setattr(OpsetCpuPlatform, "early_rules", module.EARLY_RULES)
        monkeypatch.setattr(OpsetCpuPlatform, "rules", module.RULES)
        monkeypatch.setattr(OpsetCpuPlatform, "where", WHERE)
        if platform == "npu":
            monkeypatch.setenv(runners.VARIABLE, "0")  # as that platform does
        return module

    return rules_of


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_setting_is_listed(platform):
    unlisted = [
        f"{owner.__name__}.{name}"
        for owner in classes()
        for name in settings(owner)
        if entry(owner.__name__, name, platform) is None
    ]
    assert not unlisted


def test_every_argument_is_listed():
    from vllm.engine.arg_utils import AsyncEngineArgs

    config = {name for owner in classes() for name in settings_table.types_of(owner)}
    arguments = {field for field in AsyncEngineArgs.__dataclass_fields__ if not field.startswith("_")}
    assert not arguments - config - set(table("arguments")["sets"])


def test_arguments_set_what_is_listed():
    known = {"honoured"} | {f"{o.__name__}.{name}" for o in classes() for name in settings_table.types_of(o)}
    here = set(engine_arguments())
    wrong = {name: said for name, said in table("arguments")["sets"].items() if name in here and said not in known}
    assert not wrong


def test_every_variable_is_listed():
    from vllm import envs

    assert not [name for name in envs.environment_variables if not settings_table.is_listed(name)]


def test_a_new_variable_of_vllms_is_not_listed():
    """Only families of devices that no platform is for may be listed by a pattern."""
    assert not settings_table.is_listed("VLLM_BRAND_NEW") and settings_table.is_listed("VLLM_ROCM_BRAND_NEW")


def engine_arguments() -> set[str]:
    from vllm.engine.arg_utils import AsyncEngineArgs

    return set(AsyncEngineArgs.__dataclass_fields__)


def listed() -> set[str]:
    """All names in the tables except patterns."""
    parts = {
        f"{owner}.{name}" for owner in table("parts") for platform in PLATFORMS for name in entries(owner, platform)
    }
    variables = [*settings_table.names(table("variables")["others"]), *settings_table.refused_variables()]
    names = {*parts, *table("parts"), *table("arguments")["sets"], *variables}
    return {name for name in names if not name.endswith(ALL)}


def offered() -> set[str]:
    """All names that this release has."""
    from vllm import envs

    owners = {owner.__name__: settings_table.types_of(owner) for owner in classes()}
    settings_ = {f"{owner}.{name}" for owner, own in owners.items() for name in own}
    return {*settings_, *owners, *engine_arguments(), *envs.environment_variables}


def test_nothing_is_listed_that_no_release_has():
    """elsewhere.yaml lists the releases of names that the default release lacks, so that misspelt names are found."""
    release, absent, elsewhere = version("vllm").partition("+")[0], listed() - offered(), table("elsewhere")
    assert not absent & set(elsewhere.get(release, ()))
    if f"RELEASE := {release}\n" in MAKEFILE.read_text():
        assert absent == set(settings_table.names(elsewhere))


def tried(*verdicts: str) -> list[tuple[str, str, str]]:
    """Platforms, classes and names of the settings with one of these verdicts that this release knows."""
    return [
        (platform, owner.__name__, name)
        for platform in PLATFORMS
        for owner in classes()
        for name in settings(owner)
        if (said := entry(owner.__name__, name, platform)) is not None and said.verdict in verdicts
    ]


@pytest.mark.parametrize("setting", tried("refused", "late"), ids=".".join)
def test_what_is_refused_is_refused(setting, rules_of, configure, flags):
    rules_of(setting[0])
    with pytest.raises(Exception, match=f"vllm-opset {WHERE}") as refusal:
        set_and_check(*setting, configure)
    (line,) = [line for line in str(refusal.value).splitlines() if "vllm-opset" in line]
    assert cures(line) <= flags, line


@pytest.mark.parametrize("setting", tried("vllm"), ids=".".join)
def test_what_vllm_refuses_is_refused(setting, rules_of, configure):
    _, owner, name = setting
    rules_of(setting[0])
    with pytest.raises((ValueError, Refusal)):
        configure(LLAMA, **arguments_for(owner, name, value_of(*setting)))


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        ({"data_parallel_size": 2, "data_parallel_rank": 0}, "--tensor-parallel-size"),
        ({"data_parallel_external_lb": True}, "--tensor-parallel-size"),
        ({"data_parallel_size": 2, "data_parallel_hybrid_lb": True}, "--tensor-parallel-size"),
        ({"data_parallel_size": 2, "data_parallel_backend": "ray"}, "--tensor-parallel-size"),
        ({"distributed_executor_backend": "ray"}, "--distributed-executor-backend"),
        ({"enable_eplb": True}, "--enable-eplb"),
    ],
    ids=str,
)
def test_what_vllm_would_check_before_is_refused(arguments, cure, configure):
    """vLLM would say that a rank is missing, that models without experts need none, or that Ray is not installed.

    It would say that experts are balanced on CUDA alone, also on an NVIDIA GPU.
    """
    with pytest.raises(Refusal, match=cure):
        configure(LLAMA, **arguments)


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """The flags of vLLM's command line."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return set(AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())._option_string_actions)


def cures(line: str) -> set[str]:
    """The flags that a refusal names; for a key of a part, the part's flag."""
    return {flag for flag in re.findall(r"--[a-z][a-z0-9-]*[a-z0-9]", line) if f"{flag}-*" not in line}


def set_and_check(platform: str, owner: str, name: str, configure) -> None:
    """Sets it as a user would, through EngineArgs where possible, and raises the error that the user would see."""
    value = value_of(platform, owner, name)
    late = entry(owner, name, platform).verdict == "late"
    config = configure(LLAMA, **({} if late else arguments_for(owner, name, value)))
    # Some settings can only be made by hand, in a complete configuration. Rules that would take values resolved by vLLM
    # for a user's choice are not checked.
    module = importlib.import_module(f"vllm_opset.platform.{platform}.refusals")
    idle = [rule for rule in (*module.EARLY_RULES, *module.RULES) if not rule.applies(config)]
    part = functools.reduce(getattr, filter(None, table("parts")[owner]["at"].split(".")), config)
    object.__setattr__(part, name, value)
    check(idle, config, WHERE)


def value_of(platform: str, owner: str, name: str) -> object:
    said = entry(owner, name, platform).value
    (cls,) = [found for found in classes() if found.__name__ == owner]
    return (
        copy.deepcopy(said) if said is not None else another(settings_table.types_of(cls)[name], getattr(cls(), name))
    )


ALIASES = {said: name for name, said in table("arguments")["sets"].items()}


def arguments_for(owner: str, name: str, value: object) -> dict[str, object]:
    """EngineArgs' own argument, or the part's argument, or nothing if neither exists."""
    known = engine_arguments()
    alias = ALIASES.get(f"{owner}.{name}", name)
    if alias in known:
        return {alias: value}
    outer, *inner = table("parts")[owner]["at"].split(".")
    if outer not in known:
        return {}
    for key in reversed((*inner, name)):
        value = {key: value}
    return {outer: value}


@pytest.mark.parametrize("platform", PLATFORMS)
def test_variables_are_refused(platform, rules_of, configure, monkeypatch):
    from vllm import envs

    rules_of(platform)
    configure(LLAMA)
    for name, value in settings_table.refused_variables(platform).items():
        if name in envs.environment_variables:
            with monkeypatch.context() as patch, pytest.raises(Refusal, match=f"unset {name}"):
                patch.setenv(name, value)
                configure(LLAMA)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_what_is_off_or_default_is_not_refused(platform, rules_of, configure, monkeypatch):
    rules_of(platform)
    for name in table("variables")["refused"]["cpu cuda npu"]:
        monkeypatch.setenv(name, "0")
    configure(
        LLAMA,
        attention_config={"use_trtllm_attention": False},
        compilation_config={"pass_config": {"fuse_norm_quant": False}},
        linear_backend="auto",
        optimization_level=0,
    )


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_number_of_zero_is_another_value_than_the_default(platform, rules_of, configure):
    """A number is not off at 0: this one lets FlashAttention choose."""
    rules_of(platform)
    with pytest.raises(Refusal, match="flash_attn_max_num_splits_for_cuda_graph"):
        configure(LLAMA, attention_config={"flash_attn_max_num_splits_for_cuda_graph": 0})


def test_a_copy_of_a_complete_configuration_is_not_refused(configure):
    """vLLM copies a configuration for a model within a model, and for one that drafts, whose copy names no worker.

    The values that it resolved then look like a user's choice.
    """
    from vllm.config import replace

    config = configure(LLAMA)
    for parallel in (config.parallel_config, replace(config.parallel_config, worker_cls="auto")):
        copy = replace(config, model_config=config.model_config, parallel_config=parallel)
        assert copy.parallel_config.worker_cls == config.parallel_config.worker_cls


# Settings that concern neither opset's attention nor its linear layers, and leave both on.
OF_NO_PART = {
    "AttentionConfig": {
        "backend",  # checked by itself
        "hisparse_config",
        "indexer_kv_dtype",
        "indexer_sparse_logits",
        "indexer_tp_shard_min_rows",
        "minimax_m3_indexer_cp",
        "minimax_m3_msa_decode_backend",
        "mla_prefill_backend",
        "sparse_mla_force_mqa",
        "sparse_mla_prefill_workspace_factor",
        "tokenspeed_mla_min_split_kv",
        "trtllm_ragged_backend",
        "use_fp4_indexer_cache",
        "use_non_causal",  # every attention supports it
        "use_prefill_query_quantization",
    },
    "KernelConfig": {
        "enable_bf16x3_router_gemm",
        "enable_cutedsl_warmup",
        "enable_flashinfer_autotune",
        "enable_jit_warmup",
        "enable_rocm_segmented_attn_autotune",
        "linear_backend_per_quant",  # for quantised layers, which vLLM's kernels keep serving
        "monokernel",
        "sparse_indexer_topk_backend",
    },
}


def test_on_vllms_own_platform_every_setting_of_kernels_is_looked_at_or_about_no_part():
    """If such a setting selects kernels that a part of opset would replace, the part is off (`cuda/test_native.py`)."""
    from vllm.config import AttentionConfig, KernelConfig

    from vllm_opset.platform.native import rules

    of_kernels = {"ir_op_priority", "linear_backend", "moe_backend"}
    looked_at = {"AttentionConfig": rules.OF_ANOTHER_BACKEND, "KernelConfig": of_kernels}
    for owner in (AttentionConfig, KernelConfig):
        assert set(settings_table.types_of(owner)) <= OF_NO_PART[owner.__name__] | looked_at[owner.__name__]
