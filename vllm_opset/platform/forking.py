"""Safe forking of a process that has used OpenMP threads.

Suppose a process has run OpenMP threads and forks an engine. The child then waits forever for these threads in its
first parallel loop: they do not exist there, and the OpenMP runtime does not know it. vLLM recommends `spawn` instead.
But `spawn` runs the user's script a second time, unless `if __name__ == "__main__"` guards it. OpenMP can release its
threads on request, so this module does that before each fork.
"""

import ctypes
import functools
import os

OMP_PAUSE_HARD = 2  # omp_pause_resource_t in OpenMP 5.0: give back everything


@functools.cache
def make_safe() -> None:
    """Release the process's OpenMP threads before every fork from now on; the next parallel loop creates them again."""
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        os.register_at_fork(before=functools.partial(pause, OMP_PAUSE_HARD))
