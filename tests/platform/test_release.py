"""The supported releases of vLLM are stated once, and other releases are handled."""

import re
import tomllib
from pathlib import Path

import pytest

from vllm_opset import platform
from vllm_opset.platform import release

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def version(monkeypatch):
    """`version("0.25.1")`: vLLM reports this release, whatever its distribution is called."""
    import vllm

    monkeypatch.delenv("OPSET_PLATFORM", raising=False)
    release.check.cache_clear()
    yield lambda version: monkeypatch.setattr(vllm, "__version__", version)
    release.check.cache_clear()


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    said = []
    monkeypatch.setattr(release.logger, "warning", said.append)
    return said


@pytest.mark.window
def test_the_release_that_runs_is_served():
    found = release.installed()
    assert release.why_refused(found) is None and release.why_doubtful(found) is None


@pytest.mark.parametrize("served", ["0.26.0", "0.30.1+empty", "0.33.9", "0.33.1.dev12+gabc", "dev"])
def test_no_word_about_a_release_that_is_served(served, version, warnings):
    version(served)
    assert platform.activate() == "vllm_opset.platform.OpsetCpuPlatform"
    assert not warnings


@pytest.mark.parametrize("choice", ["auto", "cpu", "cuda", "native", "npu"])
def test_an_older_release_is_refused_at_once_with_the_cure(choice, version, monkeypatch):
    version("0.25.1")
    monkeypatch.setenv("OPSET_PLATFORM", choice)
    activated = platform.activate()
    with pytest.raises(platform.PluginError, match=r"vLLM 0\.25\.1 is too old .*: pip install 'vllm>=0\.26,<0\.34'\."):
        getattr(platform, activated.rpartition(".")[2])


def test_an_older_release_runs_without_the_plugin(version, monkeypatch):
    version("0.25.1")
    monkeypatch.setenv("OPSET_PLATFORM", "off")
    assert platform.activate() is None


@pytest.mark.parametrize("newer", ["0.34.0", "1.0.0rc1"])
def test_a_newer_release_is_warned_of_once(newer, version, warnings):
    version(newer)
    assert [platform.activate(), platform.activate()] == ["vllm_opset.platform.OpsetCpuPlatform"] * 2
    assert len(warnings) == 1 and warnings[0].startswith(f"vLLM {newer} is newer ") and release.WINDOW in warnings[0]


def test_the_processes_of_an_engine_do_not_say_it_again(version, warnings, monkeypatch):
    version("0.34.0")
    monkeypatch.setattr(release.multiprocessing, "parent_process", object)
    release.check()
    assert not warnings


def test_the_window_is_the_same_wherever_it_is_stated():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["vllm"] == [release.WINDOW]
    readme = (REPOSITORY / "README.md").read_text()
    assert "vLLM {}.{} to {}.{}".format(*release.OLDEST, *release.NEWEST) in readme
    assert "up to {}.{} is served".format(*release.NEWEST) in readme
    tested = re.search(r"^WINDOW := (.*)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)[1].split()
    minors = [tuple(map(int, version.split(".")[:2])) for version in tested]
    assert minors == [(0, minor) for minor in range(release.OLDEST[1], release.NEWEST[1] + 1)]
