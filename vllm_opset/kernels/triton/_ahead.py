"""Compiles kernels several at a time, before anything launches them."""

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
MOST_THREADS = 8  # a fifth of a compilation holds Python's lock
# Each thread puts back what it found. If two were within at once, the first one's function would be what stays.
_one_thread_at_a_time = threading.RLock()


@contextmanager
def compiled_ahead() -> Iterator[None]:
    """Within it a call of a kernel has it compiled in another thread, and does not launch it; at its end all are ready.

    The kernels write nothing, so nothing that is called may depend on their results. One that cannot be compiled
    raises when it is called again. Kernels that are not opset's run, and so do all that other threads call. Another
    thread that wants to compile ahead waits.
    """
    this_thread, threads = threading.get_ident(), min(MOST_THREADS, len(os.sched_getaffinity(0)))
    with _one_thread_at_a_time, _Pool(threads) as pool, AsyncCompileMode(pool, ignore_errors=True):
        run = JITFunction.run

        def compile_only(self, *args, warmup, **kwargs):
            ahead = threading.get_ident() == this_thread and self.module.startswith(OURS)
            return run(self, *args, warmup=warmup or ahead, **kwargs)

        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = run


class _Pool(ThreadPoolExecutor):
    def submit(self, compile_kernel: Callable[[], CompiledKernel]) -> Future[CompiledKernel]:
        return super().submit(_with_launcher, compile_kernel)


def _with_launcher(compile_kernel: Callable[[], CompiledKernel]) -> CompiledKernel:
    """Leaves what launches the kernel in Triton's cache: up to 3.6 it is C, else compiled when it is launched first."""
    kernel = compile_kernel()
    driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel
