"""A process that has used threads can be forked.

A forked engine whose parent has run OpenMP threads waits for them forever in its first parallel loop: they do not exist
in the child, and the runtime does not know. vLLM's own advice, `spawn`, runs the user's script a second time unless it
is guarded by `if __name__ == "__main__"`. OpenMP can be asked to give its threads back, so that is done before a fork.
"""

import ctypes
import functools
import os

OMP_PAUSE_HARD = 2  # omp_pause_resource_t in OpenMP 5.0: give back everything


@functools.cache
def make_safe() -> None:
    """From now on the OpenMP threads of a process are given back before it forks; they come back with the next loop."""
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        os.register_at_fork(before=functools.partial(pause, OMP_PAUSE_HARD))
