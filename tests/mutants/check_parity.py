"""Checks a kernel by samples and properties of its contract up to the first failure.

The arguments are OP KERNEL [WORDS]: words of the names of samples and properties.

Exits with 0 if every check agrees, with 1 if one does not, and with 3 if nothing was run.
"""

import sys
from collections.abc import Iterator

from vllm_opset import ops, parity
from vllm_opset.kernel import Kernel, kernels_of
from vllm_opset.ops.contract import Op
from vllm_opset.parity import Check

DEVICE = "cpu"
AGREES, DISAGREES, NOT_RUN = 0, 1, 3


def main(op_name: str, kernel_name: str, words: str = "") -> int:
    op = ops.BY_NAME[op_name]
    kernel = kernels_of(op_name).get(kernel_name)
    verdict = NOT_RUN
    for check in _checks(op, kernel, words) if kernel is not None and kernel.runs_on(DEVICE) else ():
        if check.failure:
            print(f"{check.dtype}, {check.case}: {check.failure}")
            return DISAGREES
        if check.skipped is None:
            verdict = AGREES
    return verdict


def _checks(op: Op, kernel: Kernel, words: str) -> Iterator[Check]:
    for dtype in op.dtypes:
        for sample in op.samples(DEVICE, dtype):
            if words in sample.name:
                yield parity.check_sample(op, kernel, sample, dtype)
        for name in op.properties:
            if words in name.replace("_", " "):
                yield parity.check_property(op, kernel, name, DEVICE, dtype)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
