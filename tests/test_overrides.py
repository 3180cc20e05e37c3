"""No user setting is ignored: an unknown one is an error that names the nearest known one."""

import os
import re
from pathlib import Path

import pytest
from readme import ROOT

import vllm_opset
from vllm_opset import overrides
from vllm_opset.overrides import OverrideError
from vllm_opset.platform import compile_cache

PACKAGE = Path(vllm_opset.__file__).parent


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    for name in [name for name in os.environ if name.startswith("OPSET_")]:
        monkeypatch.delenv(name)


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
