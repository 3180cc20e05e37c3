"""`vllm-opset parity`: checks kernels against the reference on all sample inputs and properties of the contracts."""

from collections.abc import Iterator, Mapping
from typing import Annotated, get_args

import torch
import typer
from rich.console import Console
from rich.progress import track

from vllm_opset import ops
from vllm_opset.cli.arguments import DTYPES, device_here, known, missing, require_device
from vllm_opset.cli.ended import results_kept
from vllm_opset.cli.jobs import in_processes
from vllm_opset.cli.show import AsJson, print_json, print_table
from vllm_opset.kernel import Kernel, kernels_of
from vllm_opset.ops.contract import Op
from vllm_opset.overrides import nearest
from vllm_opset.parity import Check, Outcome, check_kernel

DEVICES = ("cpu", "cuda", "npu")
OUTCOMES = get_args(Outcome)


def check(
    names: Annotated[list[str] | None, typer.Argument(metavar="OP", help="Ops to check; all without one.")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or npu; by default the accelerator, or the CPU without one.")
    ] = None,
    kernel: Annotated[str | None, typer.Option(help="Only the kernels of this name.")] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help=f"Only this one of {', '.join(DTYPES)}; may be repeated.")
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Kernels and dtypes to check at a time, each in a process of its own.")
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Check kernels against the references; exit with 1 if one disagrees, or if no case was checked.

    It is an error if the options leave nothing to check of an op that is named.

    After Ctrl-C, SIGTERM or an exception, it reports what it has checked, and exits with 1.
    """
    device = device or device_here(DEVICES)
    chosen = _chosen(names or [], device, kernel, dtype or [])
    require_device(device, DEVICES)  # after kernels are loaded, because that also loads PyTorch's extension for NPUs
    checks, left = _run(chosen, device, jobs)
    counts = {outcome: sum(check.outcome == outcome for check in checks) for outcome in OUTCOMES}
    if as_json:
        print_json({"device": device, **counts, "left": left, "checks": [_plain(check) for check in checks]})
    else:
        _print(checks, counts, device)
        if left:
            print(f"Ended before {left} of {len(chosen)} kernels and dtypes were checked.")
    raise typer.Exit(0 if counts["passed"] and not counts["failed"] and not left else 1)


def _chosen(
    names: list[str], device: str, kernel_name: str | None, dtypes: list[str]
) -> list[tuple[str, str, torch.dtype]]:
    """The op, the kernel and the dtype of all checks, as the options say. Raises BadParameter if they leave none."""
    every_op = list(dict.fromkeys(names or ops.BY_NAME))
    found = list(_kernels(every_op, device, kernel_name))
    wanted = {DTYPES[known(name, DTYPES, "--dtype")] for name in dtypes}
    if not found:
        known_here = {kernel.name for _, kernel in _kernels(every_op, device, None)}
        hint = f"{missing(device)}; {nearest(kernel_name, known_here)}"
        raise typer.BadParameter(f"no kernel named {kernel_name!r} runs on {device}{hint}", param_hint="--kernel")
    chosen = [(op.name, kernel.name, one) for op, kernel in found for one in op.dtypes if not wanted or one in wanted]
    if not chosen:
        raise typer.BadParameter("none of the ops is checked in this dtype", param_hint="--dtype")
    if unchecked := sorted(set(names) - {op for op, _, _ in chosen}):
        raise typer.BadParameter(
            f"the options leave nothing to check of {', '.join(unchecked)}: leave out these ops, or the options",
            param_hint="OP",
        )
    return chosen


def _run(chosen: list[tuple[str, str, torch.dtype]], device: str, jobs: int) -> tuple[list[Check], int]:
    """The checks, and how many kernels and dtypes were left when Ctrl-C, SIGTERM or an exception ended them."""
    calls = [(*one, device) for one in chosen]
    results = in_processes(_list_of_checks, calls, jobs) if jobs > 1 else (_checks(*call) for call in calls)
    checks, left = [], len(chosen)
    with results_kept(checks):
        for of_one in track(results, "checking", total=len(chosen), console=Console(stderr=True), transient=True):
            for check in of_one:
                checks.append(check)
            left -= 1
    return checks, left


def _print(checks: list[Check], counts: Mapping[str, int], device: str) -> None:
    print_table(f"Parity on {device}", ("op", "kernel", "dtype", "passed", "skipped", "worst"), _summary(checks))
    for check in checks:
        if check.failure:
            print(f"FAILED {check.op}={check.kernel} {check.dtype}, {check.case}: {check.failure}")
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    if not counts["passed"] and not counts["failed"]:
        print(f"NOTHING WAS CHECKED: no case is supported; the first: {checks[0].case}: {checks[0].skipped}")


def _checks(op: str, kernel: str, dtype: torch.dtype, device: str) -> Iterator[Check]:
    return check_kernel(ops.BY_NAME[op], kernels_of(op)[kernel], device, [dtype])


def _list_of_checks(*checked) -> list[Check]:
    return list(_checks(*checked))


def _kernels(names: list[str], device: str, kernel_name: str | None) -> Iterator[tuple[Op, Kernel]]:
    """The kernels of these ops that run on a device; only those of a name, unless it is None."""
    for name in names:
        for kernel in kernels_of(known(name, ops.BY_NAME, "OP")).values():
            if kernel.runs_on(device) and kernel_name in (None, kernel.name):
                yield ops.BY_NAME[name], kernel


def _summary(checks: list[Check]) -> Iterator[dict]:
    groups: dict[tuple, list[Check]] = {}
    for check in checks:
        groups.setdefault((check.op, check.kernel, str(check.dtype).removeprefix("torch.")), []).append(check)
    for (op, kernel, dtype), group in groups.items():
        ran = [check for check in group if check.outcome != "skipped"]
        errors = [check.error for check in ran if check.error is not None]
        yield {
            "op": op,
            "kernel": kernel,
            "dtype": dtype,
            "passed": f"{sum(check.outcome == 'passed' for check in ran)} of {len(ran)}",
            "skipped": len(group) - len(ran) or None,
            "worst": f"{max(errors):.2f} of the tolerance" if errors else None,
        }


def _plain(check: Check) -> dict:
    return {**vars(check), "dtype": str(check.dtype).removeprefix("torch."), "outcome": check.outcome}
