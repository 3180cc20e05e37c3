"""Where the library of C++ kernels comes from, and what is said where it cannot be had."""

import os
import shutil
import stat
import sys

import pytest
from processes import run

from vllm_opset.kernels.cpp._build import CURE

NEEDS_COMPILER = pytest.mark.skipif(
    not shutil.which("g++"), reason="no g++: runs once it is installed, as .ci/run requires"
)
SHOW = """
import torch
from vllm_opset import kernel, ops, selection
from vllm_opset.ops.contract import Problem
choice = selection.select(ops.silu_and_mul, Problem("cpu", torch.float32))
print(choice.kernel.name, "|", kernel.unavailable().get("cpp"))
"""


def choice(**variables) -> tuple[str, str]:
    """Which kernel serves silu_and_mul in a process of its own, and why there are no C++ kernels there."""
    finished = run(sys.executable, "-c", SHOW, **variables)
    assert finished.code == 0, finished
    name, _, reason = finished.out.strip().partition(" | ")
    return name, reason


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("/nowhere/g++", f"there is no C++ compiler '/nowhere/g++': {CURE}"),
        ("false", f"false cannot build them (status 1): {CURE}"),
    ],
)
def test_without_a_compiler_the_torch_kernels_serve(tmp_path, compiler, reason):
    assert choice(CXX=compiler, OPSET_CACHE=tmp_path) == ("cpu", reason)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("instead_of_building", "reason"),
    [
        ('echo "x.cpp:1: error: no" >&2; exit 1', "cannot build them (x.cpp:1: error: no): "),
        ('for built; do :; done; echo junk >"$built"; exit 0', "the library cannot be loaded: "),
    ],
)
def test_a_compiler_that_fails_is_named_with_its_error(tmp_path, instead_of_building, reason):
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *-shared*) {instead_of_building};; esac\nexec g++ "$@"\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    name, said = choice(CXX=compiler, OPSET_CACHE=tmp_path / "cache")
    assert name == "cpu" and reason in said


@NEEDS_COMPILER
def test_built_once(tmp_path):
    cache = tmp_path / "cache"
    assert choice(OPSET_CACHE=cache) == ("cpp", "None")
    (library,) = os.listdir(cache)
    built = (cache / library).stat().st_mtime_ns
    assert choice(OPSET_CACHE=cache) == ("cpp", "None")
    assert os.listdir(cache) == [library] and (cache / library).stat().st_mtime_ns == built


@NEEDS_COMPILER
def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    name, reason = choice(OPSET_CACHE=tmp_path / "file" / "cache")
    assert name == "cpu"
    assert reason == f"{tmp_path}/file/cache cannot be written to (Not a directory): name another by OPSET_CACHE"


@NEEDS_COMPILER
def test_an_override_of_what_is_not_there_says_why(tmp_path):
    finished = run(
        sys.executable, "-c", SHOW, CXX="/nowhere/g++", OPSET_CACHE=tmp_path, OPSET_KERNELS="silu_and_mul=cpp"
    )
    assert "silu_and_mul has no kernel 'cpp' here; there is no C++ compiler" in finished.err


@NEEDS_COMPILER
def test_without_a_home_the_torch_kernels_serve():
    script = "import pathlib; pathlib.Path.home = classmethod(lambda cls: (_ for _ in ()).throw(RuntimeError()))" + SHOW
    finished = run(sys.executable, "-c", script)
    assert finished.out.strip().endswith(
        "there is no home directory to keep the library in: name a folder by OPSET_CACHE"
    )
