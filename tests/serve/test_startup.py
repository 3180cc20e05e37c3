"""What is wrong from the start ends it: loudly, with the name and the cure, and never with stock vLLM."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import OUR_FRAME, Finished, run, serve_command

import vllm_opset

pytestmark = pytest.mark.serve

CURE = "Mend that, or set OPSET_PLATFORM=off to run vLLM without this plugin"
MISSING = "ModuleNotFoundError: No module named 'a_module_that_is_missing'"
# Loaded when vLLM asks for its platform, and when it loads its general plugins.
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


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    """All of them, two at a time: each takes as long as importing vLLM does."""
    folder = tmp_path_factory.mktemp("starts")
    with ThreadPoolExecutor(2) as pool:
        starts = {module: pool.submit(without_module, folder, module) for module in BROKEN_MODULES}
        starts["import"] = pool.submit(with_users_kernels, folder, "import a_module_that_is_missing")
        starts["op"] = pool.submit(run, *serve_command(), "--additional-config", json.dumps(MISSPELT))
        starts["choice"] = pool.submit(run, *serve_command(), OPSET_PLATFORM="of")
        starts["off"] = pool.submit(run, *serve_command(), OPSET_PLATFORM="off")
        yield starts


def assert_failed(start: Finished, *words: str) -> None:
    assert start.code == 1, start
    for word in words:
        assert word in start.output, start
    assert "Failed to infer device type" not in start.output, "stock vLLM went on by itself"


@pytest.mark.parametrize("module", BROKEN_MODULES)
def test_a_module_that_cannot_be_imported(starts, module):
    assert_failed(starts[module].result(), f"vllm_opset.{module} cannot be imported: {MISSING}", CURE)


def test_a_users_module_that_cannot_be_imported(starts):
    assert_failed(
        starts["import"].result(),
        f"OPSET_IMPORT: importing 'users_kernels' raised {MISSING}",
        "Mend it, put its folder on PYTHONPATH, or take it out of OPSET_IMPORT",
    )


def test_a_wrong_name_in_an_override(starts):
    assert_failed(starts["op"].result(), "--additional-config: unknown op 'rms_nrom'; did you mean 'rms_norm'?")


def test_a_wrong_choice_of_platform(starts):
    assert_failed(starts["choice"].result(), "OPSET_PLATFORM='of' is not a choice; known: auto, cpu, cuda, native")


def test_switched_off_the_plugin_has_no_part_in_it(starts):
    """Stock vLLM, which has no device here and says so."""
    start = starts["off"].result()
    assert start.code == 1, start
    assert "Failed to infer device type" in start.output
    assert OUR_FRAME not in start.output
