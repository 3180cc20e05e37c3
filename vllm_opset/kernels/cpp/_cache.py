"""The cache of built libraries: a folder, and files in it, that no other user can write to.

The folder is $OPSET_CACHE, else $XDG_CACHE_HOME/vllm-opset, else ~/.cache/vllm-opset. Loading a library runs its code.
So a library is not loaded if another user could have created or changed it.
"""

import contextlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

MODE = 0o700  # permissions of the folders and files that are created here
ROOT = 0
CURE = "name a folder that is yours alone by OPSET_CACHE"

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM's handlers, without importing vLLM


class NoFolder(Exception):
    """There is nowhere to keep a library."""


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """The cache folder, created if necessary. If other users can write to it, a temporary folder. Raises NoFolder."""
    folder = _named()
    try:
        folder.mkdir(mode=MODE, parents=True, exist_ok=True)
    except OSError as error:
        raise NoFolder(not_writable(folder, error)) from error
    if reason := _why_not(folder, stat.S_ISDIR):
        logger.warning("%s is not used, since it %s. C++ kernels are built at every start: %s", folder, reason, CURE)
        with tempfile.TemporaryDirectory(prefix="vllm-opset-") as temporary:
            yield Path(temporary)
    elif os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise NoFolder(f"{folder} is mounted so that no code in it may run (noexec): name another by OPSET_CACHE")
    else:
        yield folder


def is_trusted(library: Path) -> bool:
    """Whether the library exists and may be loaded."""
    if not os.path.lexists(library):
        return False
    if reason := _why_not(library, stat.S_ISREG):
        logger.warning("%s is built anew, since it %s", library, reason)
    return reason is None


def not_writable(folder: Path, error: OSError) -> str:
    """The message for a folder that cannot be written to, with the cure."""
    return f"{folder} cannot be written to ({error.strerror}): name another by OPSET_CACHE"


def _why_not(path: Path, is_of_kind: Callable[[int], bool]) -> str | None:
    """The reason why another user may have written the file or folder, or None."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link"
    if not is_of_kind(status.st_mode):
        return "is of another kind of file"
    if status.st_uid not in (os.geteuid(), ROOT):
        return f"belongs to another user (uid {status.st_uid})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written to by others (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def _named() -> Path:
    if folder := os.environ.get("OPSET_CACHE"):
        return Path(folder).absolute()  # the loader looks for a name without a folder elsewhere
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches) / "vllm-opset"
    try:
        return Path.home() / ".cache" / "vllm-opset"
    except RuntimeError as error:
        raise NoFolder("there is no home directory to keep the library in: name a folder by OPSET_CACHE") from error
