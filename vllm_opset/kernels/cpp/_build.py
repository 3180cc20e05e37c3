"""The library of all C++ kernels: built once for a compiler, a processor and these sources, and kept in a cache.

The compiler is `g++`; CXX names another one that takes its flags. Where the library is kept is in `_cache`.
"""

import ctypes
import functools
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_opset.kernels.cpp import _cache

SOURCES = Path(__file__).parent
# Not -ffast-math: NaNs must come through. What is not needed for vector code is errno and the flags of exceptions.
FLAGS = ("-std=gnu++17", "-O3", "-march=native", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
CURE = "install g++ 12 or newer, or name one by CXX"
TIME_LIMIT = 300  # seconds, of a build that takes two on a processor of today
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
        return Library(_loaded(), None)
    except (Missing, _cache.NoFolder) as reason:
        return Library(None, str(reason))
    except OSError as error:
        return Library(None, f"the library cannot be loaded: {error}")


def function(name: str, *argument_types, returns=None) -> Callable:
    """A function of the library."""
    found = library().code[name]
    found.argtypes, found.restype = argument_types, returns
    return found


def _loaded() -> ctypes.CDLL:
    """Raises Missing, and OSError for a library that cannot be loaded."""
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    if not shutil.which(compiler[0]):
        raise Missing(f"there is no C++ compiler {compiler[0]!r}: {CURE}")
    # All that the compiler knows about itself, its version too, and about the processor that it compiles for.
    macros = _run([*compiler, *FLAGS, "-dM", "-E", "-x", "c++", os.devnull])
    sources = sorted(SOURCES.glob("*.cpp"))
    texts = [path.read_text() for path in [*sources, *sorted(SOURCES.glob("*.h"))]]
    key = hashlib.sha256("\0".join([*compiler, macros, *FLAGS, *_openmp(), *texts]).encode()).hexdigest()[:16]
    with _cache.private_folder() as folder:
        path = folder / f"kernels-{key}.so"
        if not _cache.is_trusted(path):
            _build(compiler, sources, path)
        return ctypes.CDLL(str(path))


def _build(compiler: list[str], sources: list[Path], path: Path) -> None:
    try:
        # Built beside its place and moved: processes that start together all build it, and none may see a part of it.
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / path.name
            _run([*compiler, *FLAGS, "-shared", *map(str, sources), *_openmp(), "-o", str(built)])
            built.chmod(_cache.MODE)
            built.replace(path)
    except OSError as error:
        raise Missing(_cache.not_writable(path.parent, error)) from error


def _openmp() -> list[str]:
    """PyTorch's own OpenMP runtime, where it brings one: a second one in a process would have threads of its own."""
    libraries = sorted((Path(torch.__file__).parent / "lib").iterdir())
    return [str(path) for path in libraries if OPENMP.match(path.name)]


def _run(command: list[str]) -> str:
    """What the compiler prints. Raises Missing with its first error, or if it takes too long."""
    # A group of its own, since a compiler starts others, which have to end with it.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    try:
        printed, errors = process.communicate(timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise Missing(
            f"{shlex.join(command[:1])} has not built them in {TIME_LIMIT} s: see whether this command ends by itself, "
            f"or name another compiler by CXX: {shlex.join(command)}"
        ) from error
    if process.returncode:
        lines = errors.splitlines()
        first = next((line for line in lines if "error" in line), f"status {process.returncode}")
        raise Missing(f"{command[0]} cannot build them ({first}): {CURE}")
    return printed
