"""What `make next-release` lists: a vLLM that is changed here, compared with itself before the change, and tests."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import surface
from launched_kernels import launched_kernels
from readme import ROOT

from vllm_opset.model import registration

SCRIPT = ROOT / "tools/next_release.py"
spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
next_release = importlib.util.module_from_spec(spec)
spec.loader.exec_module(next_release)
MODULES = ("vllm_opset.platform.base", "vllm_opset.platform.cpu.worker")


@pytest.fixture(scope="module", autouse=True)
def few_modules():
    """This file looks at two of the package's modules, which say enough and take a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(surface, "module_names", lambda: list(MODULES))
        yield


@pytest.fixture
def drift():
    """`drift()`: what changed since this fixture was made, as (kind, name) and the change."""
    before = surface.surface()
    return lambda: {(kind, name): change for kind, name, change in next_release.drifted(before, surface.surface())}


def test_nothing_drifts_by_itself(drift):
    assert drift() == {}


def test_every_kind_of_drift_is_listed(drift, monkeypatch):
    from vllm import envs
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.model_executor import custom_op
    from vllm.platforms.interface import Platform

    monkeypatch.setattr(Platform, "get_attention_backend_class", Platform.__dict__["get_attn_backend_cls"], False)
    monkeypatch.delattr(Platform, "get_attn_backend_cls")
    monkeypatch.setattr(Platform, "opaque_attention_op", classmethod(lambda cls, layer: False))
    monkeypatch.setitem(envs.environment_variables, "VLLM_BRAND_NEW", lambda: None)
    monkeypatch.delitem(custom_op.op_registry_oot, "RMSNorm")
    monkeypatch.delattr("vllm.v1.attention.backends.registry.register_backend")
    monkeypatch.delattr("vllm.model_executor.models.registry._MULTIMODAL_MODELS")
    monkeypatch.delitem(AsyncEngineArgs.__dataclass_fields__, "seed")
    new_kernel = "vllm.v1.worker.gpu.new._kernel"
    monkeypatch.setattr(surface, "launched_kernels", lambda: launched_kernels() | {new_kernel: ("x_ptr", "size")})
    platform = "vllm.platforms.interface.Platform"
    found = drift()
    assert found["overridden method", f"{platform}.get_attn_backend_cls"] == "gone"
    assert found["overridden method", f"{platform}.opaque_attention_op"] == "() -> (layer)"
    assert found["refused call", "vllm_opset.platform.base.OpsetPlatform.opaque_attention_op"].startswith("new refuses")
    assert found["hook", "Platform.get_attention_backend_class"].startswith("new (selected_backend")
    assert found["import", f"{MODULES[0]}: vllm.model_executor.models.registry._MULTIMODAL_MODELS"] == "new missing"
    assert found["setting", "AsyncEngineArgs.seed"] == "gone"
    assert found["variable", "VLLM_BRAND_NEW"] == "new"
    assert found["registration", f"{registration.REGISTRY}: RMSNorm"] == "gone"
    assert found["bridge", "attention backend"] == "needed -> not needed"
    assert found["kernel", new_kernel] == "new (x_ptr, size)"


REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_passes"/>
<testcase classname="tests.a" name="test_fails"><failure message="assert 1 == 2&#10;and more"/></testcase>
<testcase classname="tests.b" name="test_errs"><error message="failed on setup"/></testcase>
<testcase classname="tests.b" name="test_is_skipped"><skipped message="needs a GPU"/></testcase>
<testcase name="tests.c"><error/></testcase>
</testsuite></testsuites>"""


def test_failures_and_errors_of_a_report_are_listed_by_their_first_lines(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert list(next_release.failed_tests(report)) == [
        ("test", "tests.a::test_fails", "assert 1 == 2"),
        ("test", "tests.b::test_errs", "failed on setup"),
        ("test", "::tests.c", "failed"),
    ]


def test_the_tests_of_the_window_run_and_those_that_fail_are_listed(tmp_path):
    file = tmp_path / "test_of_a_window.py"
    file.write_text("""
import pytest
@pytest.mark.window
def test_passes(): pass
@pytest.mark.window
@pytest.mark.engine
def test_starts_an_engine(): assert not "an engine"
def test_of_one_release(): assert not "in the window"
""")
    arguments = ["-n", "0", "-p", "no:cacheprovider", str(file)]
    assert next_release.run_tests(next_release.LIGHT, arguments) == []
    ((kind, name, change),) = next_release.run_tests(next_release.WHOLE, arguments)
    assert (kind, name.rpartition("::")[2], change) == (
        "test", "test_starts_an_engine", "AssertionError: assert not 'an engine'",
    )  # fmt: skip
    nothing = next_release.run_tests(next_release.WHOLE, [*arguments, "-k", "absent"])
    assert nothing == [("test", "window", "pytest ended with status 5")]


def test_a_source_tree_is_installed_without_what_earlier_builds_left(tmp_path, monkeypatch):
    for folder in ("vllm/build", "build", "vllm.egg-info"):
        (tmp_path / folder).mkdir(parents=True)
    installed = []

    def run(command, **how):
        assert how["check"]
        *_, python, requirement = command
        tree = Path(requirement.removeprefix("vllm @ file://"))
        installed.append((python, sorted(str(path.relative_to(tree)) for path in tree.rglob("*"))))

    monkeypatch.setattr(subprocess, "run", run)
    next_release.install(tmp_path)
    assert installed == [(sys.executable, ["vllm", "vllm/build"])]


@pytest.mark.parametrize(("arguments", "marks"), [((), next_release.WHOLE), (("--light",), next_release.LIGHT)])
@pytest.mark.parametrize("missing", [[], ["a.module"]])
@pytest.mark.parametrize("failed", [[], [next_release.Drift("test", "tests.a::test_fails", "assert 1 == 2")]])
def test_the_command_fails_if_anything_drifts_or_a_test_fails(
    arguments, marks, missing, failed, tmp_path, monkeypatch, capsys
):
    """Nothing is built, and no test runs."""
    after = {"import": dict.fromkeys(missing, "missing")}
    replaced = Mock()
    replaced.surface_of.side_effect = lambda python, *without: after if python == sys.executable else {"import": {}}
    replaced.run_tests.return_value = failed
    for name in ("install", "surface_of", "release_of", "run_tests"):
        monkeypatch.setattr(next_release, name, getattr(replaced, name))
    status = next_release.main("served", str(tmp_path), *arguments, "-k", "words")
    replaced.install.assert_called_once_with(tmp_path)
    replaced.surface_of.assert_called_with("served", after["import"])
    replaced.run_tests.assert_called_once_with(marks, ["-k", "words"])
    assert status == bool(missing or failed)
    assert f"{len(missing)} drifted, {len(failed)} tests failed" in capsys.readouterr().out
