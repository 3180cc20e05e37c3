"""The number of threads that an engine computes with, and how they wait for each other."""

import os
import threading

import torch

from vllm_opset.platform.bridges import lacks
from vllm_opset.platform.cpu import machine

VARIABLE = "OPSET_NUM_THREADS"
AUTO = "auto"
# What tells GNU's OpenMP how threads wait. A user who sets one of them has decided.
HOW_TO_WAIT = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
# What lets GNU's OpenMP bind threads to places, such as cores.
BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
# PyTorch gives a thread at least so many elements (at::internal::GRAIN_SIZE).
SHARE = 32768
# Says that vLLM, and not the user, set OMP_NUM_THREADS (0.28 and later).
VLLMS_MARK = "VLLM_OMP_NUM_THREADS_SET_BY_VLLM"

# This process set OPSET_NUM_THREADS to this value when it configured an engine. It is empty before.
_remembered = ""
# Threads that sleep, and how many of OpenMP's each has beside itself.
_sleepers: list[tuple[threading.Thread, int]] = []


def remember_users_choice() -> None:
    """Keep OMP_NUM_THREADS as the user set it, for the workers of the engine that is being configured.

    vLLM sets it for several workers (up to 0.27: to 1). If it is a list, which OpenMP uses for nested loops, the first
    number counts. A value that is not a number is ignored, as OpenMP ignores it too.

    The choice goes to the workers by OPSET_NUM_THREADS, unless the user has set that.
    """
    global _remembered
    user_has_chosen = os.environ.get(VARIABLE, "") not in ("", _remembered)
    # An earlier engine of this process has the user's value, and vLLM has overwritten the variable since.
    is_kept = _remembered and _is_vllms()
    if user_has_chosen or is_kept:
        return
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    _remembered = os.environ[VARIABLE] = first if first.isdecimal() and int(first) else AUTO


def _is_vllms() -> bool:
    """Whether vLLM may have set OMP_NUM_THREADS. Up to 0.27 it does not say so."""
    return os.environ.get(VLLMS_MARK) == "1" or lacks("vllm.utils.torch_utils.OMP_NUM_THREADS_SET_BY_VLLM")()


def set_compute_threads(num_workers: int) -> int:
    """Set and return the number of threads of this worker, one of `num_workers` on this machine.

    It is OPSET_NUM_THREADS, or OMP_NUM_THREADS as it was when the engine was configured. Without either, it is this
    worker's share of all physical cores. A second thread on a core would only compete with the first for the core's
    vector units.
    """
    choice = users_choice()
    torch.set_num_threads(max(1, machine.physical_cores() // num_workers if choice == AUTO else int(choice)))
    wait_asleep()
    return torch.get_num_threads()


def wait_asleep() -> None:
    """Let PyTorch's threads sleep while they wait for each other, unless the user said how they should wait.

    By default, GNU's OpenMP lets them wait actively for milliseconds. They then keep the cores from other threads, such
    as those of the C++ kernels (kernels/cpp/team.cpp) and vLLM's other processes. OpenMP reads its variables when
    PyTorch is imported, which is too early for a plugin. But it lets threads sleep almost at once if there are more of
    them than CPUs (GOMP_SPINCOUNT in the manual of libgomp), so this function starts some that never work. A later
    engine of the process has those of the first one.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1 or any(os.environ.get(variable) for variable in HOW_TO_WAIT):
        return
    asleep = sum(number for thread, number in _sleepers if thread.is_alive())  # a forked process has none
    missing = len(os.sched_getaffinity(0)) + 1 - num_threads - asleep
    if missing <= 0:
        return
    started = threading.Event()

    def start_and_sleep() -> None:
        # These are threads of this Python thread, and they exist as long as it does. It counts as one of them.
        torch.set_num_threads(missing + 1)
        torch.zeros(2 * SHARE * torch.get_num_threads()).add_(1)
        started.set()
        threading.Event().wait()

    sleeper = threading.Thread(target=start_and_sleep, name="opset-idle", daemon=True)
    sleeper.start()
    started.wait()
    _sleepers.append((sleeper, missing))


def are_bound() -> bool:
    """Whether OpenMP has bound all threads to one core.

    It binds the thread that loads PyTorch to one of its places, which may be a core. All other threads and processes
    that this thread starts inherit the place, such as those of the C++ kernels and vLLM's workers.
    """
    is_on = any(os.environ.get(variable) for variable in BINDING)
    return is_on and machine.cores_of(os.sched_getaffinity(0)) == 1 < machine.cores_of(range(os.cpu_count() or 1))


def users_choice() -> str:
    """The number of threads as text, or AUTO, also for an empty value. Raises ValueError for anything else."""
    choice = os.environ.get(VARIABLE) or AUTO
    if choice != AUTO and not (choice.isdecimal() and int(choice)):
        raise ValueError(
            f"{VARIABLE}={choice!r} is neither a number of threads nor {AUTO!r}. Set it to one of these, or unset it"
        )
    return choice
