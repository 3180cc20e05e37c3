"""Tests the search for the library of C++ kernels, and the message if it is unavailable."""

import contextlib
import ctypes
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import run

from vllm_opset.kernels.cpp import _build
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
    """The kernel that serves silu_and_mul in a process of its own, and the reason why it has no C++ kernels."""
    finished = run(sys.executable, "-c", SHOW, **variables)
    assert finished.code == 0, finished.output
    name, _, reason = finished.out.strip().partition(" | ")
    return name, reason


def test_without_a_compiler_the_torch_kernels_serve(tmp_path):
    compiler = "/nowhere/g++"
    assert choice(CXX=compiler, OPSET_CACHE=tmp_path) == ("cpu", f"there is no C++ compiler '{compiler}': {CURE}")


@NEEDS_COMPILER
def test_an_override_of_what_is_not_there_says_why(tmp_path):
    finished = run(
        sys.executable, "-c", SHOW, CXX="/nowhere/g++", OPSET_CACHE=tmp_path, OPSET_KERNELS="silu_and_mul=cpp"
    )
    assert "silu_and_mul has no kernel 'cpp' here; there is no C++ compiler" in finished.err


@NEEDS_COMPILER
def test_every_locale_has_the_kernels():
    """Python then reads texts as ASCII, and the sources are in UTF-8."""
    assert choice(LC_ALL="C", PYTHONCOERCECLOCALE=0, PYTHONUTF8=0) == ("cpp", "None")


# One function instead of all kernels: it is built in no time.
SOURCE = 'extern "C" int answer() { return 42; }'
PLANTED = """
#include <cstdio>
__attribute__((constructor)) static void ran() { std::fclose(std::fopen(MARKER, "w")); }
extern "C" int answer() { return 0; }
"""
OTHER_USER = 12345
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user: runs as root")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A folder for the cache, which does not exist yet, and sources of one function."""
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "answer.cpp").write_text(SOURCE)
    monkeypatch.setattr(_build, "SOURCES", tmp_path / "sources")
    monkeypatch.setenv("OPSET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def load() -> ctypes.CDLL:
    """Loads the library as a starting process does."""
    found = _build.library.__wrapped__()
    assert found.reason is None
    return found.code


def why_not() -> str:
    """The reason why a starting process has no library."""
    found = _build.library.__wrapped__()
    assert found.code is None
    return found.reason


def compiler_that(folder: Path, text: str) -> str:
    """A compiler that is a script."""
    compiler = folder / "c++"
    compiler.write_text(f"#!/bin/sh\n{text}\n")
    compiler.chmod(0o700)
    return str(compiler)


def test_a_compiler_that_fails_without_a_word_is_named(cache, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    assert why_not() == f"false cannot build them (status 1): {CURE}"


def test_a_compiler_that_cannot_be_read_is_named(cache, monkeypatch):
    monkeypatch.setenv("CXX", "g++ '-O2")
    assert why_not() == f"""CXX="g++ '-O2" cannot be read (No closing quotation): {CURE}"""


@NEEDS_COMPILER
def test_a_blank_name_of_a_compiler_names_none(cache, monkeypatch):
    monkeypatch.setenv("CXX", " ")
    assert load().answer() == 42


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("instead_of_building", "reason"),
    [
        # Compilers have the word in English if LC_ALL is C.
        ('test $LC_ALL = C && echo "x.cpp:1: error: no" >&2; exit 1', "cannot build them (x.cpp:1: error: no): "),
        ('for built; do :; done; echo junk >"$built"; exit 0', "the library cannot be loaded: "),
    ],
)
def test_a_compiler_that_fails_is_named_with_its_error(cache, tmp_path, monkeypatch, instead_of_building, reason):
    script = f'case "$*" in *-shared*) {instead_of_building};; esac\nexec g++ "$@"'
    monkeypatch.setenv("CXX", compiler_that(tmp_path, script))
    assert reason in why_not()


@NEEDS_COMPILER
def test_a_cache_that_cannot_be_written_is_named(tmp_path, cache, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("OPSET_CACHE", str(tmp_path / "file" / "cache"))
    assert why_not() == f"{tmp_path}/file/cache cannot be written to (Not a directory): name another by OPSET_CACHE"


@NEEDS_COMPILER
def test_without_a_home_the_folder_for_caches_serves_or_the_cure_is_named(cache, monkeypatch):
    monkeypatch.delenv("OPSET_CACHE")
    monkeypatch.setattr(Path, "home", raises(RuntimeError))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert load().answer() == 42 and [*(cache / "vllm-opset").iterdir()]
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert why_not() == "there is no home directory to keep the library in: name a folder by OPSET_CACHE"


def raises(error: type[Exception]):
    def call():
        raise error

    return call


@NEEDS_COMPILER
def test_the_cache_may_be_the_working_directory(cache, monkeypatch):
    cache.mkdir(mode=0o700)
    monkeypatch.chdir(cache)
    monkeypatch.setenv("OPSET_CACHE", ".")
    assert load().answer() == 42 and [*cache.iterdir()]


@NEEDS_COMPILER
def test_what_is_built_can_be_written_to_by_nobody_else(cache):
    with umask(0):
        assert load().answer() == 42
    (library,) = cache.iterdir()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (cache, library)] == [0o700, 0o700]


@contextlib.contextmanager
def umask(mask: int):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def theirs(library: Path) -> None:
    os.chown(library, OTHER_USER, OTHER_USER)


def anybodys(library: Path) -> None:
    library.chmod(0o777)


def link(library: Path) -> None:
    library.symlink_to(library.rename(library.with_suffix(".elsewhere")))


def in_their_folder(library: Path) -> None:
    os.chown(library.parent, OTHER_USER, OTHER_USER)


def in_anybodys_folder(library: Path) -> None:
    library.parent.chmod(0o1777)


def in_a_folder_that_is_a_link(library: Path) -> None:
    library.parent.symlink_to(library.parent.rename(library.parent.with_suffix(".elsewhere")))


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("place", "said"),
    [
        pytest.param(theirs, f"is built anew, since it belongs to another user (uid {OTHER_USER})", marks=NEEDS_ROOT),
        (anybodys, "is built anew, since it can be written to by others (mode 777)"),
        (link, "is built anew, since it is a symbolic link"),
        pytest.param(in_their_folder, f"since it belongs to another user (uid {OTHER_USER})", marks=NEEDS_ROOT),
        (
            in_anybodys_folder,
            "since it can be written to by others (mode 1777). C++ kernels are built at every start: ",
        ),
        (
            in_a_folder_that_is_a_link,
            "since it is a symbolic link. C++ kernels are built at every start: name a folder",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_library_that_others_could_have_written_is_not_loaded(cache, place, said, caplog):
    """Loading the library runs its code with the rights of the user who starts vLLM."""
    load()
    (library,) = cache.iterdir()
    marker, source = cache.with_name("marker"), cache.with_name("planted.cpp")
    source.write_text(f'#define MARKER "{marker}"\n{PLANTED}')
    library.unlink()
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library], check=True)
    library.chmod(0o700)
    place(library)
    with caplog.at_level(logging.WARNING, "vllm"):
        assert load().answer() == 42
    assert not marker.exists()
    assert said in caplog.text


@NEEDS_COMPILER
def test_built_once(cache, caplog):
    with caplog.at_level(logging.INFO, "vllm"):
        load()
    assert "Compiling the C++ kernels" in caplog.text
    caplog.clear()
    (library,) = cache.iterdir()
    built = library.stat()
    with caplog.at_level(logging.INFO, "vllm"):
        assert load().answer() == 42 and [*cache.iterdir()] == [library]
    assert (library.stat().st_ino, library.stat().st_mtime_ns) == (built.st_ino, built.st_mtime_ns)
    assert not caplog.text


@NEEDS_COMPILER
def test_a_damaged_library_is_built_anew(cache, monkeypatch, caplog):
    """A machine that loses its power after the build may leave an empty file."""
    load()
    (built,) = cache.iterdir()
    damaged = cache.with_name("another") / built.name
    damaged.parent.mkdir(mode=0o700)
    damaged.touch(mode=0o700)
    monkeypatch.setenv("OPSET_CACHE", str(damaged.parent))
    with caplog.at_level(logging.WARNING, "vllm"):
        assert load().answer() == 42
    assert f"{damaged} is built anew, since it cannot be loaded: " in caplog.text


@NEEDS_COMPILER
def test_a_cache_whose_code_may_not_run_is_named(cache, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_flag=os.ST_NOEXEC))
    assert why_not() == (f"{cache} is mounted so that no code in it may run (noexec): name another by OPSET_CACHE")


@NEEDS_COMPILER
@pytest.mark.parametrize("change", ["source", "flags", "compiler"])
def test_built_anew_for_another_source_compiler_or_flag(change, cache, tmp_path, monkeypatch):
    load()
    if change == "source":
        (_build.SOURCES / "answer.cpp").write_text(SOURCE.replace("42", "43"))
    elif change == "flags":
        monkeypatch.setattr(_build, "FLAGS", (*_build.FLAGS, "-fwrapv"))
    else:
        monkeypatch.setenv("CXX", compiler_that(tmp_path, 'exec g++ "$@"'))
    assert load().answer() == (43 if change == "source" else 42)
    assert len([*cache.iterdir()]) == 2


@pytest.fixture
def endless(monkeypatch, tmp_path) -> str:
    """A compiler that does not end. Another process that it has started must end by the end of the test."""
    child = tmp_path / "child"
    compiler = compiler_that(tmp_path, f"sleep 600 &\necho $! >{child}\nwait")
    monkeypatch.setenv("CXX", compiler)
    yield compiler
    state = Path(f"/proc/{child.read_text().strip()}/stat")
    for _ in range(50):  # until it is gone, or waits for the process that adopted it
        if not state.exists() or state.read_text().split()[2] == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("what the compiler had started goes on")


@NEEDS_COMPILER
def test_a_compiler_that_does_not_end_is_given_up(cache, monkeypatch, endless):
    monkeypatch.setattr(_build, "TIME_LIMIT", 1)
    assert why_not().startswith(
        f"{endless} has not built them in 1 s: see whether this command ends by itself, or name "
    )


@NEEDS_COMPILER
def test_a_compiler_ends_if_the_build_is_interrupted(cache, endless):
    """Ctrl-C reaches the processes of the terminal's foreground, and the compiler is not among them."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(1)
    try:
        with pytest.raises(KeyboardInterrupt):
            why_not()
    finally:
        signal.signal(signal.SIGALRM, before)
