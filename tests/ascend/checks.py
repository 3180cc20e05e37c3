"""The checks: every Ascend kernel, by the parity suite of its op, on the CPU."""

import dataclasses
from collections.abc import Iterator

import torch
from caches import LONG, split_caches
from emulation import Limits

from vllm_opset import ops, parity
from vllm_opset.kernel import Kernel, kernels_of
from vllm_opset.ops.contract import Op, Problem

DEVICES = {"A2": "Ascend910B3", "A3": "Ascend910_9362", "A5": "Ascend950PR_9589", "310P": "Ascend310P3"}
KERNELS = [(op, kernel) for op in ops.ALL for kernel in kernels_of(op.name).values() if kernel.provider == "ascend"]


def by_name(func: torch._ops.OpOverload, args: tuple, kwargs: dict | None) -> dict:
    """The arguments of an operator call, without those left at their defaults."""
    names = (argument.name for argument in func._schema.arguments)
    return dict(zip(names, args, strict=False)) | (kwargs or {})


def run_checks(op: Op, kernel: Kernel, limits: Limits) -> Iterator[parity.Check]:
    """The checks that the kernel does not refuse. RELAXED gives it problems in fp32 that it supports in bf16."""
    kernel = _taking_fp32(kernel) if limits is Limits.RELAXED else kernel
    return (check for check in _all_checks(op, kernel) if check.skipped is None)


def _all_checks(op: Op, kernel: Kernel) -> Iterator[parity.Check]:
    with split_caches():
        yield from parity.check_kernel(op, kernel, "cpu")
    if op is ops.paged_attention:
        for name, case in LONG.items():
            for dtype in op.dtypes:
                yield parity.check_sample(op, kernel, case.sample(name, "cpu", dtype), dtype)


def _taking_fp32(kernel: Kernel) -> Kernel:
    def supports(problem: Problem) -> str | None:
        if kernel.supports(problem) is None:
            return None
        dtypes = {name: torch.bfloat16 for name, value in vars(problem).items() if value == torch.float32}
        return kernel.supports(dataclasses.replace(problem, **dtypes))

    return dataclasses.replace(kernel, supports=supports)
