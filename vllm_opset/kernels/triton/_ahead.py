"""Compiles kernels several at a time, before anything launches them."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from triton import AsyncCompileMode
from triton.runtime.jit import JITFunction

OURS = __name__.partition(".")[0] + "."
MOST_THREADS = 8  # a fifth of a compilation holds Python's lock


@contextmanager
def compiled_ahead() -> Iterator[None]:
    """Within it a call of a kernel has it compiled in another thread, and does not launch it; at its end all are ready.

    What kernels would write is not written, so nothing that is called may depend on it. One that cannot be compiled
    raises when it is called again. Kernels that are not opset's run.
    """
    run = JITFunction.run

    def compile_only(self, *args, warmup, **kwargs):
        return run(self, *args, warmup=warmup or self.module.startswith(OURS), **kwargs)

    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads) as pool, AsyncCompileMode(pool, ignore_errors=True):
        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = run
