"""matrix.py: prints the support matrix of docs/ascend.md, from the answers of the kernels' own `supports`.

It runs over the stand-ins for the driver: see README.md. For each product, a kernel's `supports` is called with every
sample problem of its op, in the split KV layout.
"""

if __name__ == "__main__":
    import conftest  # noqa: F401  loads torch_npu

import emulation
from caches import split_caches
from checks import DEVICES, KERNELS
from emulation import Limits
from probes import CALLERS

from vllm_opset.cli.ops import _limits
from vllm_opset.kernel import Kernel
from vllm_opset.kernels.ascend import _constraints
from vllm_opset.ops.contract import Op

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def rows() -> list[str]:
    head = ["op", "kernel", "operator of torch_npu", *DEVICES, "what `supports` says", "source"]
    return [_line(head), _line(["---"] * len(head)), *(_line(_row(op, kernel)) for op, kernel in KERNELS)]


def _row(op: Op, kernel: Kernel) -> list[str]:
    operators = [name for name, caller in CALLERS.items() if caller == str(kernel)] or ["npu_gelu"]
    products = [_dtypes(op, kernel, device) for device in DEVICES.values()]
    sources = dict.fromkeys(_constraints.OPERATORS[name].source for name in operators)
    called = ", ".join(f"`{name}`" for name in operators)
    return [f"`{op.name}`", f"`{kernel.name}`", called, *products, _limits(kernel), "; ".join(sources)]


def _dtypes(op: Op, kernel: Kernel, device: str) -> str:
    """The dtypes in which the kernel supports a sample on a product."""
    with emulation.mode(Limits.STRICT, device), split_caches():
        supported = [dtype for dtype in op.dtypes if any(_supports(op, kernel, s) for s in op.samples("cpu", dtype))]
    return " ".join(SHORT[str(dtype).removeprefix("torch.")] for dtype in supported) or "no"


def _supports(op: Op, kernel: Kernel, sample) -> bool:
    args, kwargs = sample.make()
    return kernel.supports(op.problem_for(*args, **kwargs)) is None


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join(rows()))
