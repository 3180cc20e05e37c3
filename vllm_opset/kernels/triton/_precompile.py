"""Compiles several kernels at a time, before anything launches them."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from triton import AsyncCompileMode
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

OURS = __name__.partition(".")[0] + "."
MAX_THREADS = 8  # a fifth of a compilation holds Python's lock
# `precompile` replaces JITFunction.run and restores it at the end. If two threads were inside at once, one of the
# replacements would stay.
_lock = threading.RLock()


@contextmanager
def precompile(*modules: str) -> Iterator[None]:
    """Inside the context, calls of kernels compile them in other threads and do not launch them.

    These are opset's kernels, and those of `modules`. All are compiled when the context ends. They write nothing inside
    it, so no call may depend on their results. A kernel that fails to compile raises at its next call. Other kernels
    run as usual, and so do all kernels that other threads call. Another thread that enters the context waits.
    """
    this_thread, threads = threading.get_ident(), min(MAX_THREADS, len(os.sched_getaffinity(0)))
    with _lock, _Pool(threads) as pool, AsyncCompileMode(pool, ignore_errors=True):
        run = JITFunction.run

        def compile_only(self, *args, warmup, **kwargs):
            named = self.module.startswith(OURS) or self.module in modules
            return run(self, *args, warmup=warmup or (named and threading.get_ident() == this_thread), **kwargs)

        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = run


class _Pool(ThreadPoolExecutor):
    def submit(self, compile_kernel: Callable[[], CompiledKernel]) -> Future[CompiledKernel]:
        return super().submit(_with_launcher, compile_kernel)


def _with_launcher(compile_kernel: Callable[[], CompiledKernel]) -> CompiledKernel:
    """Compiles the kernel and its launcher into Triton's cache.

    Up to Triton 3.6 the launcher is C code, which Triton would otherwise compile at the first launch.
    """
    kernel = compile_kernel()
    driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel
