"""Overrides by users. None is ignored: an unknown one is an error that names the nearest known one."""

import os
import re
import sys
from pathlib import Path

import pytest
from added_kernels import ACTIVATION, NORM, add_kernel, clean  # noqa: F401
from readme import ROOT

import vllm_opset
from vllm_opset import devices, ops, overrides
from vllm_opset import kernel as registry
from vllm_opset.kernel import PROVIDERS
from vllm_opset.overrides import OverrideError
from vllm_opset.platform import compile_cache
from vllm_opset.selection import configure, select

PACKAGE = Path(vllm_opset.__file__).parent


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    for name in [name for name in os.environ if name.startswith("OPSET_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def override(monkeypatch, tmp_path):
    """Sets an override through one of the three sources: `override(source, {"layer_norm": "reference"})`."""

    def override(source: str, kernels: dict[str, str], key: str = "kernels") -> dict:
        if source == "OPSET_KERNELS":
            monkeypatch.setenv("OPSET_KERNELS", ",".join(f"{op}={name}" for op, name in kernels.items()))
        if source == "OPSET_CONFIG":
            path = tmp_path / "opset.yaml"
            path.write_text(f"{key}:\n" + "".join(f"  {op}: {name}\n" for op, name in kernels.items()))
            monkeypatch.setenv("OPSET_CONFIG", str(path))
        return {"opset": {key: kernels}} if source == "--additional-config" else {}

    return override


SOURCES = pytest.mark.parametrize("source", ["OPSET_KERNELS", "OPSET_CONFIG", "--additional-config"])


# What they do.


@SOURCES
def test_an_override_is_obeyed_and_named_as_the_reason(source, override):
    configure(override(source, {"layer_norm": "reference"}))
    choice = select(ops.layer_norm, NORM)
    assert choice.kernel.name == "reference"
    assert choice.reason.startswith(f"asked for by {source}")
    assert select(ops.gelu_new, ACTIVATION).kernel.name == "cpu"


def test_the_most_specific_source_counts(override):
    for name in ("one", "two", "three"):
        add_kernel(name=name)
    override("OPSET_KERNELS", {"layer_norm": "one", "gelu_new": "reference"})
    assert select(ops.layer_norm, NORM).kernel.name == "one"
    override("OPSET_CONFIG", {"layer_norm": "two"})
    configure()
    assert select(ops.layer_norm, NORM).kernel.name == "two"
    configure(override("--additional-config", {"layer_norm": "three"}))
    assert select(ops.layer_norm, NORM).kernel.name == "three"
    assert select(ops.gelu_new, ACTIVATION).kernel.name == "reference", "a source overrides ops, not whole sources"


def test_spaces_and_empty_words_do_not_matter(monkeypatch):
    monkeypatch.setenv("OPSET_KERNELS", " layer_norm = reference ,, gelu_new=reference,")
    assert {op: override.kernel for op, override in configure().items()} == {
        "layer_norm": "reference",
        "gelu_new": "reference",
    }


def test_an_empty_file_says_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("OPSET_CONFIG", str(tmp_path / "empty.yaml"))
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert configure() == {}


def test_other_users_of_additional_config_are_left_alone():
    assert configure({"somebody else": {"layer_norm": "theirs"}}) == {}


# Messages to users.


@SOURCES
def test_an_unknown_op_is_an_error_that_names_the_nearest(source, override):
    with pytest.raises(OverrideError, match=f"{source}.*unknown op 'rms_nrom'; did you mean 'rms_norm'?"):
        configure(override(source, {"rms_nrom": "reference"}))


@SOURCES
def test_an_unknown_kernel_is_an_error_that_names_the_nearest(source, override):
    with pytest.raises(
        OverrideError, match=f"{source}.*layer_norm has no kernel 'refrence' here; did you mean 'reference'?"
    ):
        configure(override(source, {"layer_norm": "refrence"}))


@pytest.mark.parametrize("source", ["OPSET_CONFIG", "--additional-config"])
def test_an_unknown_key_is_an_error_that_names_the_nearest(source, override):
    with pytest.raises(OverrideError, match=f"{source}.*unknown key 'kernel'; did you mean 'kernels'?"):
        configure(override(source, {"layer_norm": "reference"}, key="kernel"))


def test_a_name_like_no_other_is_answered_with_all():
    with pytest.raises(OverrideError, match="has no kernel 'xyzzy' here; known: cpu, reference"):
        configure({"opset": {"kernels": {"gelu_new": "xyzzy"}}} | {})


def test_a_kernel_that_cannot_run_here_is_not_suggested(monkeypatch):
    add_kernel(name="tritone", devices=("cuda",))
    monkeypatch.setattr(devices, "here", lambda: ["cpu"])
    with pytest.raises(OverrideError, match=r"no kernel 'tritn' here; known: cpu, reference$"):
        configure({"opset": {"kernels": {"layer_norm": "tritn"}}})
    monkeypatch.setattr(devices, "here", lambda: ["cpu", "cuda"])
    with pytest.raises(OverrideError, match="did you mean 'triton"):
        configure({"opset": {"kernels": {"layer_norm": "tritn"}}})


@pytest.mark.parametrize("additional", [{"opsett": {}}, {"kernels": {"layer_norm": "reference"}}], ids=str)
def test_configuring_checks_every_setting(additional, monkeypatch):
    with pytest.raises(OverrideError, match="--additional-config"):
        configure(additional)
    monkeypatch.setenv("OPSET_KERNEL", "layer_norm=reference")
    with pytest.raises(OverrideError, match="OPSET_KERNEL is no variable"):
        configure()


def test_a_word_that_is_no_pair_is_an_error(monkeypatch):
    monkeypatch.setenv("OPSET_KERNELS", "layer_norm")
    with pytest.raises(OverrideError, match="OPSET_KERNELS: 'layer_norm' is not of the form op=kernel"):
        configure()


@pytest.mark.parametrize(
    "config", ["reference", ["layer_norm"], {"kernels": "reference"}, {"kernels": ["layer_norm"]}], ids=str
)
def test_a_config_of_another_shape_is_an_error(config):
    with pytest.raises(OverrideError, match=r"--additional-config.*expected keys with values, not"):
        configure({"opset": config})


@pytest.mark.parametrize("value", [True, 3, None, ["reference"]], ids=str)
def test_a_kernel_that_is_no_name_is_an_error(value):
    with pytest.raises(OverrideError, match="layer_norm has no kernel"):
        configure({"opset": {"kernels": {"layer_norm": value}}})


def test_a_file_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setenv("OPSET_CONFIG", "/nowhere/opset.yaml")
    with pytest.raises(OverrideError, match=r"OPSET_CONFIG: cannot read /nowhere/opset\.yaml: .*No such file"):
        configure()


def test_a_file_that_is_no_text_is_an_error(monkeypatch, tmp_path):
    (tmp_path / "opset.yaml").write_bytes(b"\xff\xfe\x00")
    monkeypatch.setenv("OPSET_CONFIG", str(tmp_path / "opset.yaml"))
    with pytest.raises(OverrideError, match=r"OPSET_CONFIG: cannot read .*opset\.yaml: .*utf-8"):
        configure()


def test_a_file_that_is_no_yaml_is_an_error(monkeypatch, tmp_path):
    (tmp_path / "opset.yaml").write_text("kernels: {layer_norm: [")
    monkeypatch.setenv("OPSET_CONFIG", str(tmp_path / "opset.yaml"))
    with pytest.raises(OverrideError, match=r"(?s)OPSET_CONFIG: cannot read .*opset\.yaml: .*line 1"):
        configure()


def test_a_kernel_that_cannot_do_it_is_refused_with_its_reason_and_those_that_can():
    add_kernel(refuses="only 128 columns")
    configure({"opset": {"kernels": {"layer_norm": "mine"}}})
    with pytest.raises(OverrideError) as error:
        select(ops.layer_norm, NORM)
    assert str(error.value) == (
        "--additional-config asks for layer_norm=mine, which cannot do it: only 128 columns "
        "(device=cpu, dtype=float32, hidden_size=64, weight_dtype=float32). "
        "Remove that override, or name a kernel that can: cpu, reference"
    )


def test_a_kernel_of_another_device_is_refused():
    add_kernel(devices=("cuda",))
    configure({"opset": {"kernels": {"layer_norm": "mine"}}})
    with pytest.raises(OverrideError, match="it runs on cuda, not on cpu"):
        select(ops.layer_norm, NORM)


def test_a_provider_that_cannot_be_had_is_named_with_its_cure(monkeypatch):
    assert "triton" in PROVIDERS
    from vllm_opset.kernels import triton

    monkeypatch.setattr(triton, "unavailable", lambda: "Triton is not installed: pip install triton")
    registry._registry["layer_norm"].pop("triton", None)
    with pytest.raises(OverrideError, match="no kernel 'triton' here; Triton is not installed: pip install triton"):
        configure({"opset": {"kernels": {"layer_norm": "triton"}}})


# The user's own modules.


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Makes an importable module of this text."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return make


def test_a_users_module_is_imported_before_its_kernels_are_named(module, monkeypatch):
    text = "from vllm_opset import kernel, ops\n\n@kernel.kernel(ops.relu2, name='mine')\ndef relu2(x): ...\n"
    module("users_kernels", text)
    monkeypatch.setenv("OPSET_IMPORT", " users_kernels, ")
    monkeypatch.setenv("OPSET_KERNELS", "relu2=mine")
    choice = select(ops.relu2, ACTIVATION)
    assert (choice.kernel.name, choice.kernel.provider) == ("mine", "users_kernels")


def test_a_users_module_that_is_not_there_is_an_error_with_the_cure(monkeypatch):
    monkeypatch.setenv("OPSET_IMPORT", "no_such_module")
    with pytest.raises(OverrideError, match=r"importing 'no_such_module' raised ModuleNotFoundError: .* PYTHONPATH"):
        configure()


def test_a_users_module_that_fails_is_an_error_that_names_it(module, monkeypatch):
    module("failing_kernels", "1 / 0")
    monkeypatch.setenv("OPSET_IMPORT", "failing_kernels")
    with pytest.raises(
        OverrideError, match="importing 'failing_kernels' raised ZeroDivisionError: division by zero"
    ) as error:
        configure()
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_a_users_module_that_ends_the_process_is_an_error_that_names_it(module, monkeypatch):
    module("a_script", "import sys; sys.exit()")
    monkeypatch.setenv("OPSET_IMPORT", "a_script")
    with pytest.raises(OverrideError, match="importing 'a_script' raised SystemExit: "):
        configure()


# Variables and keys.


def test_the_variables_are_those_that_the_package_reads_and_the_page_explains():
    text = "".join(file.read_text() for file in PACKAGE.rglob("*.py") if file.name != "overrides.py")
    by_key = {f"OPSET_{key.upper()}" for key in overrides.CONFIG_KEYS}
    assert {*re.findall(r"\bOPSET_[A-Z_]+\b", text)} | by_key == {*overrides.VARIABLES, *overrides.INTERNAL}
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert {*re.findall(r"^\| `(OPSET_\w+)", page, re.MULTILINE)} == {*overrides.VARIABLES}


@pytest.mark.parametrize(
    ("variable", "meant"),
    [("OPSET_KERNEL", "OPSET_KERNELS"), ("OPSET_THREADS", "OPSET_NUM_THREADS"), ("OPSET_PLATFROM", "OPSET_PLATFORM")],
)
def test_an_unknown_variable_is_an_error_that_names_the_nearest(variable, meant, monkeypatch):
    monkeypatch.setenv(variable, "rms_norm=reference")
    with pytest.raises(OverrideError, match=f"^{variable} is no variable of vllm-opset; did you mean '{meant}'"):
        overrides.check({})


@pytest.mark.parametrize("variable", [*overrides.VARIABLES, *overrides.INTERNAL])
def test_a_known_variable_is_none(variable, monkeypatch):
    monkeypatch.setenv(variable, "1")
    overrides.check({})


@pytest.mark.parametrize("key", ["opsett", "Opset", "opest", "vllm-opset", "vllm_opset"])
def test_a_misspelled_key_of_ours_is_an_error(key):
    with pytest.raises(OverrideError, match=f"--additional-config: unknown key '{key}'; did you mean 'opset'"):
        overrides.check({key: {"kernels": {"rms_norm": "reference"}}})


@pytest.mark.parametrize("key", overrides.CONFIG_KEYS)
def test_a_key_that_is_not_under_ours_is_an_error(key):
    with pytest.raises(OverrideError, match=f"'{key}' belongs under \"opset\""):
        overrides.check({key: {"rms_norm": "reference"}})


def test_other_keys_are_other_peoples():
    overrides.check({compile_cache.KEY: "CPU", "offset": 1, "preset": 2, "enable_something": True, 3: 4})


@pytest.mark.parametrize("key", overrides.CONFIG_KEYS)
def test_a_name_that_is_there_twice_is_an_error(key, monkeypatch, tmp_path):
    variable = f"OPSET_{key.upper()}"
    monkeypatch.setenv(variable, "rms_norm=cpp,silu_and_mul=cpu, rms_norm = reference")
    with pytest.raises(OverrideError, match=f"{variable}: rms_norm is there twice"):
        list(overrides.settings(key, {}))
    monkeypatch.delenv(variable)
    monkeypatch.setenv("OPSET_CONFIG", str(tmp_path / "opset.yaml"))
    (tmp_path / "opset.yaml").write_text(f"{key}:\n  rms_norm: cpp\n  rms_norm: reference\n")
    with pytest.raises(OverrideError, match=r"(?s)OPSET_CONFIG: cannot read .*'rms_norm' is there twice.*line 3"):
        list(overrides.settings(key, {}))


@pytest.mark.parametrize(("value", "counts"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_calls_are_counted_or_not(value, counts, monkeypatch):
    if value is not None:
        monkeypatch.setenv("OPSET_COUNT_CALLS", value)
    assert overrides.counts_calls() is counts


def test_another_value_for_counting_calls_is_an_error(monkeypatch):
    monkeypatch.setenv("OPSET_COUNT_CALLS", "yes")
    with pytest.raises(OverrideError, match="OPSET_COUNT_CALLS is 1 or 0, not 'yes'"):
        overrides.check({})
