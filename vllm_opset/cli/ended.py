"""SIGTERM as an exception, for benchmarks.

SIGTERM ends Python at once by default. As an exception, it lets a benchmark report what it has measured, as after
Ctrl-C, and end the engines that it started.
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Make SIGTERM raise SystemExit, as Ctrl-C raises KeyboardInterrupt."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
