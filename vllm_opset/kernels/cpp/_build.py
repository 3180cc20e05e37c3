"""The library of all C++ kernels: built once for a compiler, a processor and these sources, and kept in a cache.

It lies in ~/.cache/vllm-opset; OPSET_CACHE names another folder. The compiler is `g++`; CXX names another one that
takes its flags.
"""

import ctypes
import functools
import hashlib
import os
import re
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
CURE = "install g++ 12 or newer, or name one by CXX"
OPENMP = re.compile(r"lib(gomp|iomp5|omp)\b.*\.so")

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
# What `with_type` in _types.h calls them.
TYPES = {torch.float32: 0, torch.bfloat16: 1}


@dataclass(frozen=True)
class Library:
    """code: the loaded library. reason: why it could not be had, or None."""

    code: ctypes.CDLL | None
    reason: str | None


class Missing(Exception):
    """What is in the way of the library."""


@functools.cache
def library() -> Library:
    """Loads it, and builds it before if nobody has."""
    try:
        return Library(ctypes.CDLL(str(_built())), None)
    except Missing as reason:
        return Library(None, str(reason))
    except OSError as error:
        return Library(None, f"the library cannot be loaded: {error}")


def function(name: str, *argument_types, returns=None) -> Callable:
    """A function of the library."""
    found = library().code[name]
    found.argtypes, found.restype = argument_types, returns
    return found


def _built() -> Path:
    """Where the library is. Raises Missing."""
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    if not shutil.which(compiler[0]):
        raise Missing(f"there is no C++ compiler {compiler[0]!r}: {CURE}")
    # All that the compiler knows about itself and the processor that it compiles for.
    macros = _run([*compiler, *FLAGS, "-dM", "-E", "-x", "c++", os.devnull])
    sources = sorted(SOURCES.glob("*.cpp"))
    texts = [path.read_text() for path in [*sources, *sorted(SOURCES.glob("*.h"))]]
    key = hashlib.sha256("\0".join([macros, *FLAGS, *_openmp(), *texts]).encode()).hexdigest()[:16]
    path = _cache() / f"kernels-{key}.so"
    if not path.exists():
        _build(compiler, sources, path)
    return path


def _build(compiler: list[str], sources: list[Path], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Built beside its place and moved: processes that start together all build it, and none may see a part of it.
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / path.name
            _run([*compiler, *FLAGS, "-shared", *map(str, sources), *_openmp(), "-o", str(built)])
            built.replace(path)
    except OSError as error:
        raise Missing(f"{path.parent} cannot be written to ({error.strerror}): name another by OPSET_CACHE") from error


def _openmp() -> list[str]:
    """PyTorch's own OpenMP runtime, where it brings one: a second one in a process would have threads of its own."""
    libraries = sorted((Path(torch.__file__).parent / "lib").iterdir())
    return [str(path) for path in libraries if OPENMP.match(path.name)]


def _cache() -> Path:
    if folder := os.environ.get("OPSET_CACHE"):
        return Path(folder)
    try:
        home = Path.home()
    except RuntimeError as error:
        raise Missing("there is no home directory to keep the library in: name a folder by OPSET_CACHE") from error
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "vllm-opset"


def _run(command: list[str]) -> str:
    """What the compiler prints. Raises Missing with its first error."""
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        lines = process.stderr.splitlines()
        error = next((line for line in lines if "error" in line), f"status {process.returncode}")
        raise Missing(f"{command[0]} cannot build them ({error}): {CURE}")
    return process.stdout
