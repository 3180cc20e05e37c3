"""`vllm-opset ops`: lists every op, its kernels, and the problems that each supports."""

import inspect
from typing import Annotated

import typer

from vllm_opset import devices, ops
from vllm_opset.cli.arguments import known
from vllm_opset.cli.show import AsJson, print_json, print_missing, print_table
from vllm_opset.kernel import Kernel, kernels_of, unavailable


def list_ops(
    names: Annotated[list[str] | None, typer.Argument(metavar="OP", help="Ops to list; all without one.")] = None,
    as_json: AsJson = False,
) -> None:
    """List every op, its kernels, and what each supports, including kernels that are unavailable on this machine."""
    chosen = [known(name, ops.BY_NAME, "OP") for name in dict.fromkeys(names or ops.BY_NAME)]
    kernels = [kernel for name in chosen for kernel in kernels_of(name, elsewhere=True).values()]
    missing = unavailable()
    for kernel in kernels:
        if not devices.run(kernel):
            missing.setdefault(kernel.provider, f"PyTorch finds no {' or '.join(kernel.devices)} device")
    rows = [{**_row(kernel), "here": "no" if kernel.provider in missing else "yes"} for kernel in kernels]
    if as_json:
        print_json({"kernels": rows, "unavailable": missing})
        return
    rows = [{**row, "variants": ", ".join(row["variants"])} for row in rows]
    columns = ("op", "kernel", "variants", "devices", "here", "supports")
    print_table("Ops and their kernels", columns, rows, listed_if_narrow=True)
    print_missing(missing)


def _row(kernel: Kernel) -> dict:
    return {
        "op": kernel.op,
        "kernel": kernel.name,
        "variants": [] if kernel.variants is None else list(kernel.variants.by_name),
        "provider": kernel.provider,
        "devices": ", ".join(kernel.devices) or "any",
        "supports": _limits(kernel),
    }


def _limits(kernel: Kernel) -> str:
    """The first paragraph of the docstring of the kernel's `supports` function, on one line."""
    text = inspect.getdoc(kernel.supports) or "not documented"
    return " ".join(text.split("\n\n")[0].split())
