"""The number of threads that an engine computes with."""

import os

import torch

from vllm_opset.platform.cpu import machine

VARIABLE = "OPSET_NUM_THREADS"
AUTO = "auto"


def remember_users_choice() -> None:
    """Keep OMP_NUM_THREADS as the user set it, for workers. vLLM sets it for several workers (up to 0.27: to 1).

    If it is a list, which OpenMP uses for nested loops, the first number counts. A value that is not a number is
    ignored, as OpenMP ignores it too.
    """
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if not os.environ.get(VARIABLE):
        os.environ[VARIABLE] = first if first.isdecimal() and int(first) else AUTO


def set_compute_threads(num_workers: int) -> int:
    """Set and return the number of threads of this worker, one of `num_workers` on this machine.

    It is OPSET_NUM_THREADS, or OMP_NUM_THREADS as it was when the engine was configured. Without either, it is this
    worker's share of all physical cores but one. A second thread on a core would only compete with the first for the
    core's vector units. vLLM's other processes need a core of their own: if they interrupt one compute thread, all the
    others wait for it.
    """
    choice = users_choice()
    torch.set_num_threads(max(1, (machine.physical_cores() - 1) // num_workers if choice == AUTO else int(choice)))
    return torch.get_num_threads()


def users_choice() -> str:
    """The number of threads as text, or AUTO, also for an empty value. Raises ValueError for anything else."""
    choice = os.environ.get(VARIABLE) or AUTO
    if choice != AUTO and not (choice.isdecimal() and int(choice)):
        raise ValueError(
            f"{VARIABLE}={choice!r} is neither a number of threads nor {AUTO!r}. Set it to one of these, or unset it"
        )
    return choice
