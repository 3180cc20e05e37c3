"""Calls in several processes, for commands with the option --jobs."""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from vllm_opset import selection

Result = TypeVar("Result")


def in_processes(function: Callable[..., Result], arguments: Iterable[tuple], jobs: int) -> Iterator[Result]:
    """The results of the function for these arguments, in their order, from that many processes.

    The processes read the overrides first. They end at once if an exception, such as Ctrl-C, ends the caller's loop.
    """
    # Processes are spawned, because a child that is forked from a process that has used a GPU cannot use the GPU.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), selection.configure) as pool:
        futures = [pool.submit(function, *one) for one in arguments]
        try:
            yield from (future.result() for future in futures)
        except BaseException:  # without this, the pool first does what its processes have taken
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise
