"""Stand-ins for the libraries of Ascend's driver, so that torch_npu can be imported without the driver.

torch_npu's wheel is linked against seven libraries of CANN. This module reads the symbols that the wheel needs from
them and compiles a function of each name, which does nothing and returns 0. With these, torch_npu imports with its real
operator schemas, Meta kernels and Python wrappers. It finds no device, and can run nothing on one.

Needs `nm`, `readelf` and `g++`, which are usually installed together.
"""

import ctypes
import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

# This library holds the functions. The others are empty and linked against it, since torch_npu loads each by name.
ALL_FUNCTIONS = "libascendcl.so"


def load() -> list[str]:
    """Compiles and loads the stand-ins for all libraries that torch_npu needs and this machine lacks.

    Call it before torch_npu is imported. Returns the names of the libraries.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = build(Path(folder))
        for path in paths:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    return sorted(path.name for path in paths)


def build(folder: Path, *driver: Path) -> list[Path]:
    """Compiles them into the folder, and returns the libraries in the order in which to load them.

    driver: object files whose functions replace the empty ones.
    """
    torch_npu, torch = _package("torch_npu"), _package("torch")
    wanting = [*torch_npu.glob("_C*.so"), *(torch_npu / "lib").glob("lib*.so")]
    missing = sorted(name for name in _needed(wanting) if not _exists(name, torch_npu / "lib", torch / "lib"))
    functions = _undefined(wanting) - _defined([*wanting, *(torch / "lib").glob("*.so*")])
    functions -= _defined(driver) if driver else set()
    return [
        _compile(folder, name, *((functions, driver) if name == ALL_FUNCTIONS else (set(), [folder / ALL_FUNCTIONS])))
        for name in sorted(missing, key=lambda name: name != ALL_FUNCTIONS)
    ]


def _package(name: str) -> Path:
    """The folder of a package, found without importing it."""
    return Path(importlib.util.find_spec(name).origin).parent


def _needed(libraries: list[Path]) -> set[str]:
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", _run("readelf", "--dynamic", *libraries)))


def _exists(name: str, *folders: Path) -> bool:
    if any((folder / name).exists() for folder in folders):
        return True
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _undefined(libraries: list[Path]) -> set[str]:
    """The functions that other libraries must define, except the system's, most of which carry versions."""
    symbols = re.findall(r"^ +U (\w+)$", _run("nm", "--dynamic", "--undefined-only", *libraries), re.MULTILINE)
    here = ctypes.CDLL(None)
    return {symbol for symbol in symbols if not hasattr(here, symbol)}


def _defined(files: Sequence[Path]) -> set[str]:
    of_libraries = ["--dynamic"] if files[0].suffix != ".o" else []
    return set(re.findall(r" \w (\w+)", _run("nm", *of_libraries, "--defined-only", *files)))


def _compile(folder: Path, name: str, functions: set[str], linked: Sequence[Path]) -> Path:
    source = "".join(f'extern "C" long {function}() {{ return 0; }}\n' for function in sorted(functions))
    command = ["g++", "-x", "c++", "-", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(folder / name)]
    command += ["-Wl,--no-as-needed", "-x", "none", *map(str, linked)]
    subprocess.run(command, input=source, text=True, check=True)
    return folder / name


def _run(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
