"""The command of this package in a process of its own."""

from processes import Finished, run


def command(*words: str, **variables: object) -> Finished:
    """`vllm-opset` with these words. variables: of its environment."""
    return run("vllm-opset", *words, **{"COLUMNS": 200, "OMP_NUM_THREADS": 1} | variables)
