"""Errors at the start end the server: with a message that names the error and the cure, and never with stock vLLM."""

import json
import shutil
from pathlib import Path

import pytest
from processes import OUR_FRAME, Finished, run, serve_command

import vllm_opset

pytestmark = pytest.mark.serve

CURE = "Fix that, or set OPSET_PLATFORM=off to run vLLM without this plugin"
MISSING = "ModuleNotFoundError: No module named 'a_module_that_is_missing'"
# vLLM loads the first when it asks for its platform, and the second when it loads its general plugins.
BROKEN_MODULES = ["platform.cpu.platform", "kernels.cpu.silu_and_mul"]
MISSPELT = {"opset": {"kernels": {"rms_nrom": "reference"}}}


def without_module(folder: Path, module: str) -> Finished:
    """A start with a copy of the plugin in which one module cannot be imported."""
    copy = folder / module / "vllm_opset"
    shutil.copytree(Path(vllm_opset.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    broken = copy / f"{module.replace('.', '/')}.py"
    broken.write_text(f"import a_module_that_is_missing\n{broken.read_text()}")
    return run(*serve_command(), PYTHONPATH=copy.parent)


def with_users_kernels(folder: Path, text: str) -> Finished:
    (folder / "users_kernels.py").write_text(text)
    return run(*serve_command(), PYTHONPATH=folder, OPSET_IMPORT="users_kernels")


def assert_failed(start: Finished, *words: str) -> None:
    assert start.code == 1, start
    for word in words:
        assert word in start.output, start
    assert "Failed to infer device type" not in start.output, "stock vLLM went on by itself"


@pytest.mark.parametrize("module", BROKEN_MODULES)
def test_a_module_that_cannot_be_imported(module, tmp_path):
    start = without_module(tmp_path, module)
    assert_failed(start, f"vllm_opset.{module} cannot be imported: {MISSING}", CURE)


def test_a_users_module_that_cannot_be_imported(tmp_path):
    assert_failed(
        with_users_kernels(tmp_path, "import a_module_that_is_missing"),
        f"OPSET_IMPORT: importing 'users_kernels' raised {MISSING}",
        "Fix it, put its folder on PYTHONPATH, or take it out of OPSET_IMPORT",
    )


def test_a_wrong_name_in_an_override():
    start = run(*serve_command(), "--additional-config", json.dumps(MISSPELT))
    assert_failed(start, "--additional-config: unknown op 'rms_nrom'; did you mean 'rms_norm'?")


def test_a_wrong_choice_of_platform():
    start = run(*serve_command(), OPSET_PLATFORM="of")
    assert_failed(start, "OPSET_PLATFORM='of' is not a choice; known: auto, cpu, cuda, native")


def test_switched_off_the_plugin_has_no_part_in_it():
    """Stock vLLM has no device here, and says so."""
    start = run(*serve_command(), OPSET_PLATFORM="off")
    assert start.code == 1, start
    assert "Failed to infer device type" in start.output
    assert OUR_FRAME not in start.output
