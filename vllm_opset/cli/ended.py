"""Ends of benchmarks before they have measured everything.

SIGTERM ends Python at once by default. As an exception, it lets a benchmark report what it has measured, as after
Ctrl-C, and end the engines that it started.
"""

import signal
import sys
import traceback
from collections.abc import Iterator, Sized
from contextlib import contextmanager


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Make SIGTERM raise SystemExit, as Ctrl-C raises KeyboardInterrupt."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def results_kept(results: Sized) -> Iterator[None]:
    """Go on after the context once there are results, whether Ctrl-C, SIGTERM or an exception ended it.

    An exception is printed.
    """
    with ended_by_sigterm():
        try:
            yield
        except BaseException as error:
            if not results:
                raise
            if isinstance(error, Exception):
                traceback.print_exception(error)
