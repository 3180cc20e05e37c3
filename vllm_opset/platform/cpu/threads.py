"""How many threads an engine computes with."""

import os

import torch

from vllm_opset.platform.cpu import machine

VARIABLE = "OPSET_NUM_THREADS"
AUTO = "auto"


def remember_users_choice() -> None:
    """Keeps OMP_NUM_THREADS as the user set it, for workers. vLLM sets it itself for several of them (0.26: to 1).

    Of a list, which OpenMP takes for nested loops, the first number; what is no number means nothing to OpenMP either.
    """
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    os.environ.setdefault(VARIABLE, first if first.isdecimal() and int(first) else AUTO)


def set_compute_threads(num_workers: int) -> int:
    """Sets, and answers, how many threads this worker computes with, of `num_workers` on this machine.

    OPSET_NUM_THREADS, or OMP_NUM_THREADS as it was when the engine was configured, or else its share of the physical
    cores but one. A second thread on a core only gets in the way of the first one's vector units; and where no core is
    left for vLLM's other processes, all threads wait for the one that these interrupt.
    """
    choice = users_choice()
    torch.set_num_threads(max(1, (machine.physical_cores() - 1) // num_workers if choice == AUTO else int(choice)))
    return torch.get_num_threads()


def users_choice() -> str:
    """A number, or AUTO. Raises ValueError for anything else."""
    choice = os.environ.get(VARIABLE, AUTO)
    if choice != AUTO and not (choice.isdecimal() and int(choice)):
        raise ValueError(
            f"{VARIABLE}={choice!r} is neither a number of threads nor {AUTO!r}. Set it to one of these, or unset it"
        )
    return choice
