"""The library of all C++ kernels: built once for a compiler, a processor and these sources, and kept in a cache.

It lies in ~/.cache/vllm-opset. OPSET_CACHE names another folder for it, CXX another compiler; the flags are those of
GCC and Clang.
"""

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
# Not -ffast-math: NaNs must come through. What is not needed for vector code is errno and the flags of exceptions.
FLAGS = ("-std=gnu++17", "-O3", "-march=native", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
# What `with_type` in _types.h calls them.
TYPES = {torch.float32: 0, torch.bfloat16: 1}


@dataclass(frozen=True)
class Library:
    """reason: why it could not be had, or None."""

    path: Path | None
    reason: str | None


@functools.cache
def library() -> Library:
    """Builds it if nobody has."""
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or shutil.which("clang++") or ""]
    if not shutil.which(compiler[0]):
        return Library(None, f"no C++ compiler {compiler[0]!r}".replace(" ''", "") + ": install g++, or set CXX")
    # All that the compiler knows about itself and the processor that it compiles for.
    macros = _run([*compiler, *FLAGS, "-dM", "-E", "-x", "c++", os.devnull])
    if macros.returncode:
        return Library(None, f"{shlex.join(compiler)} does not know the flags: {_first_error(macros)}")
    sources = sorted(SOURCES.glob("*.cpp"))
    texts = [path.read_text() for path in [*sources, *sorted(SOURCES.glob("*.h"))]]
    key = hashlib.sha256("\0".join([macros.stdout, *FLAGS, *_openmp(), *texts]).encode()).hexdigest()[:16]
    path = _cache() / f"kernels-{key}.so"
    if path.exists():
        return Library(path, None)
    return _build(compiler, sources, path)


def function(name: str, *argument_types) -> Callable:
    """A function of the library, which returns nothing."""
    found = _loaded()[name]
    found.argtypes, found.restype = argument_types, None
    return found


def _build(compiler: list[str], sources: list[Path], path: Path) -> Library:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Built beside its place and moved: processes that start together all build it, and none may see a part of it.
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / path.name
            compiled = _run([*compiler, *FLAGS, "-shared", *map(str, sources), *_openmp(), "-o", str(built)])
            if compiled.returncode:
                return Library(None, f"{shlex.join(compiler)} failed: {_first_error(compiled)}")
            built.replace(path)
    except OSError as error:
        return Library(None, f"cannot write to {path.parent} ({error.strerror}): set OPSET_CACHE to another folder")
    return Library(path, None)


@functools.cache
def _loaded() -> ctypes.CDLL:
    return ctypes.CDLL(str(library().path))


def _openmp() -> list[str]:
    """PyTorch's own OpenMP runtime, where it brings one: a second one in a process would have threads of its own."""
    return [str(path) for path in sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*.so*"))]


def _cache() -> Path:
    if folder := os.environ.get("OPSET_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-opset"


def _run(command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True)


def _first_error(process: subprocess.CompletedProcess) -> str:
    lines = process.stderr.splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else f"status {process.returncode}")
