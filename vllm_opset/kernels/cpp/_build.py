"""The library of all C++ kernels: built once for a compiler, a processor and these sources, and kept in a cache.

The compiler is `g++`; CXX names another one that takes the same flags. `_cache` decides where the library is kept.
"""

import ctypes
import functools
import hashlib
import logging
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

from vllm_opset.kernels.cpp import _cache, _calls

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM's handlers, without importing vLLM
SOURCES = Path(__file__).parent
# -ffast-math is not used, because NaNs must be preserved. errno and the flags of exceptions are switched off, because
# they are not needed and prevent vector code.
FLAGS = ("-std=gnu++20", "-O3", "-march=native", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
CURE = "install g++ 12 or newer, or name one by CXX"
TIME_LIMIT = 300  # seconds; a build takes 35 of one core of an AMD EPYC
OPENMP = re.compile(r"lib(gomp|iomp5|omp)\b.*\.so")

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@dataclass(frozen=True)
class Library:
    """code: the loaded library, or None. reason: why it could not be built or loaded, or None."""

    code: ctypes.CDLL | None
    reason: str | None


class Missing(Exception):
    """The library cannot be built; the message says why."""


@functools.cache
def library() -> Library:
    """Loads the library, and builds it first if necessary."""
    try:
        return Library(_loaded(), None)
    except (Missing, _cache.NoFolder) as reason:
        return Library(None, str(reason))
    except OSError as error:
        return Library(None, f"the library cannot be loaded: {error}")


def function(name: str, *argument_types, returns=None) -> Callable:
    """A function of the library. Its calls can be noted (`_calls`)."""
    found = library().code[name]
    found.argtypes, found.restype = argument_types, returns
    return _calls.Function(found)


def _loaded() -> ctypes.CDLL:
    """The loaded library. Raises Missing if it cannot be built, and OSError if it cannot be loaded."""
    compiler = _compiler()
    if not shutil.which(compiler[0]):
        raise Missing(f"there is no C++ compiler {compiler[0]!r}: {CURE}")
    # The macros describe the compiler, including its version, and the processor that it compiles for.
    macros = _run([*compiler, *FLAGS, "-dM", "-E", "-x", "c++", os.devnull])
    sources = sorted(SOURCES.glob("*.cpp"))
    words = "\0".join([*compiler, macros, *FLAGS, *_openmp()]).encode(errors="surrogateescape")
    texts = [path.read_bytes() for path in [*sources, *sorted(SOURCES.glob("*.h"))]]
    key = hashlib.sha256(b"\0".join([words, *texts])).hexdigest()[:16]
    with _cache.private_folder() as folder:
        path = folder / f"kernels-{key}.so"
        if (kept := _kept(path)) is not None:
            return kept
        logger.info("Compiling the C++ kernels, which may take half a minute and happens once: %s", path)
        _build(compiler, sources, path)
        return ctypes.CDLL(str(path))


def _compiler() -> list[str]:
    """The compiler, with the options that CXX gives it. Raises Missing if CXX cannot be read."""
    words = os.environ.get("CXX", "")
    try:
        return shlex.split(words) or ["g++"]
    except ValueError as error:
        raise Missing(f"CXX={words!r} cannot be read ({error}): {CURE}") from error


def _kept(path: Path) -> ctypes.CDLL | None:
    """The library that was built before; None without one, and if it is damaged."""
    if not _cache.is_trusted(path):
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        logger.warning("%s is built anew, since it cannot be loaded: %s", path, error)
        return None


def _build(compiler: list[str], sources: list[Path], path: Path) -> None:
    try:
        # Processes that start together all build the library, and none may see an incomplete file. So each builds it in
        # a temporary folder on the same file system and moves it.
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / path.name
            _run([*compiler, *FLAGS, "-shared", *map(str, sources), *_openmp(), "-o", str(built)])
            built.chmod(_cache.MODE)
            built.replace(path)
    except OSError as error:
        raise Missing(_cache.not_writable(path.parent, error)) from error


def _openmp() -> list[str]:
    """PyTorch's own OpenMP runtime, if it has one. A second runtime in the process would have its own threads."""
    libraries = sorted((Path(torch.__file__).parent / "lib").iterdir())
    return [str(path) for path in libraries if OPENMP.match(path.name)]


def _run(command: list[str]) -> str:
    """Runs the compiler and returns its output. Raises Missing with its first error, or if it takes too long."""
    # The compiler gets its own process group, because the processes that it starts must end with it. It writes English,
    # in which its errors are found, and it may quote a source that Python's encoding lacks.
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"LC_ALL": "C"},
        text=True,
        errors="replace",
        process_group=0,
    ) as process:
        try:
            printed, errors = process.communicate(timeout=TIME_LIMIT)
        except subprocess.TimeoutExpired as error:
            raise Missing(
                f"{shlex.join(command[:1])} has not built them in {TIME_LIMIT} s: see whether this command ends by "
                f"itself, or name another compiler by CXX: {shlex.join(command)}"
            ) from error
        finally:
            if process.returncode is None:  # also after Ctrl-C, which does not reach the compiler's group
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        lines = errors.splitlines()
        first = next((line for line in lines if "error" in line), f"status {process.returncode}")
        raise Missing(f"{command[0]} cannot build them ({first}): {CURE}")
    return printed
