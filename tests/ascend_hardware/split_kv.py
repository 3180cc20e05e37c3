"""split_kv.py OP [DEVICE]: the parity suite of an op on a KV cache, for its Ascend kernels, with caches that they take.

Never run on hardware. `vllm-opset parity --device npu` skips these kernels because its cache is packed. Here all
samples and properties that do not specify their cache have the split KV layout, in blocks of 128. It prints one line
of JSON.
"""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "ascend"))

from caches import LONG, split_caches
from probes import kernels

from vllm_opset import ops, parity


def verdict(op_name: str, device: str) -> dict:
    op, checks = ops.BY_NAME[op_name], []
    for kernel in (kernel for kernel in kernels() if kernel.op == op_name):
        with split_caches():
            checks += parity.check_kernel(op, kernel, device)
        if op is ops.paged_attention:
            samples = [(case.sample(name, device, dtype), dtype) for name, case in LONG.items() for dtype in op.dtypes]
            checks += [parity.check_sample(op, kernel, sample, dtype) for sample, dtype in samples]
    ran = [check for check in checks if check.skipped is None]
    wrong = [f"{check.kernel} {check.dtype} {check.case}: {check.failure}" for check in ran if check.failure]
    nothing = None if ran else "no sample is supported on this product"
    worst = max((check.error for check in ran if check.error is not None), default=None)
    return {"why_not": "; ".join(wrong[:3]) or nothing, "ran": len(ran), "wrong": wrong, "worst": worst}


if __name__ == "__main__":
    print(json.dumps(verdict(sys.argv[1], (sys.argv[2:] or ["npu"])[0])))
