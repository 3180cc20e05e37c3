"""Checks the Triton kernels of ops in Triton's interpreter, on a CPU.

    TRITON_INTERPRET=1 python tests/kernels/triton/interpret.py [--every N] OP ...

All that `parity` checks is checked in the first dtype of an op, which is fp32 where it has that. In bf16, every Nth
sample is, and each that the kernel did not support in fp32. fp16 takes no other path through a kernel than bf16, and a
GPU checks it. Prints JSON: the checks.
"""

import json
import sys
from collections.abc import Iterator
from typing import Annotated

import torch
import typer

from vllm_opset import ops
from vllm_opset.kernel import kernels_of
from vllm_opset.ops.contract import Op
from vllm_opset.parity import Check, check_kernel, check_sample


def main(names: Annotated[list[str], typer.Argument(metavar="OP")], every: int = 1) -> None:
    checks = [
        vars(check) | {"dtype": str(check.dtype)} for name in names for check in _checks(ops.BY_NAME[name], every)
    ]
    json.dump({"checks": checks}, sys.stdout)


def _checks(op: Op, every: int) -> Iterator[Check]:
    kernel, first = kernels_of(op.name)["triton"], op.dtypes[0]
    checks = list(check_kernel(op, kernel, "cpu", [first]))
    yield from checks
    if torch.bfloat16 in op.dtypes[1:]:
        ran = {check.case for check in checks if check.skipped is None}
        for index, sample in enumerate(op.samples("cpu", torch.bfloat16)):
            if index % every == 0 or sample.name not in ran:
                yield check_sample(op, kernel, sample, torch.bfloat16)


if __name__ == "__main__":
    typer.run(main)
