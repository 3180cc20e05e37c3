"""The measured ceilings of this machine: the rate of reading memory, and the rates of multiplying matrices."""

from dataclasses import dataclass

import torch

from vllm_opset import targets
from vllm_opset.bench.timing import time_call
from vllm_opset.ops.contract import Cost
from vllm_opset.ops.schemes import FP8, INT8

READ_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}  # many times the last-level cache
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}


@dataclass(frozen=True)
class Ceilings:
    """bytes_per_second: of reading memory. flops_per_second: of a matrix product in `dtype`, on random data.

    fp8_flops_per_second: of a matrix product in fp8. None if the device has no fp8 arithmetic, or if results were kept
    before this rate was measured.
    """

    bytes_per_second: float
    flops_per_second: float
    dtype: torch.dtype
    fp8_flops_per_second: float | None = None

    def floor(self, cost: Cost) -> float:
        """The least seconds that a call of this cost takes at the measured rates.

        A product of another size may be faster than those that were measured. Products of int8 are taken to have the
        rate of fp8, or that of `dtype` without one. A GPU may multiply int8 faster.
        """
        rate = self.flops_per_second
        if cost.factors in (FP8, INT8):
            rate = max(rate, self.fp8_flops_per_second or 0)  # a kernel may widen the factors where that is faster
        return max(cost.bytes / self.bytes_per_second, cost.flops / rate)


def measure(device: str, dtype: torch.dtype) -> Ceilings:
    """Measure the ceilings, on idle hardware, in about a second."""
    buffer = torch.randn(READ_BYTES[device] // 4, device=device)
    reading = time_call(torch.sum, ((buffer,), {}), device)
    size = MATMUL_SIZE[device]
    factors = tuple(torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = time_call(torch.matmul, (factors, {}), device)
    return Ceilings(buffer.nbytes / reading.median, 2 * size**3 / product.median, dtype, _fp8_rate(device))


def _fp8_rate(device: str) -> float | None:
    """FLOP a second of a product in fp8 with a scale for each whole factor, or None if the device has no fp8."""
    if targets.FP8 not in targets.of(device).features:
        return None
    scale = torch.ones((), device=device)
    # Slower sums, of more bits, would not be a ceiling of kernels that sum as the tensor cores do.
    how = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    rates = []
    for size in (MATMUL_SIZE[device] // 2, MATMUL_SIZE[device]):  # the longer product has the lower clock
        x, weight = (torch.randn(size, size, device=device).to(FP8) for _ in range(2))
        product = time_call(torch._scaled_mm, ((x, weight.t(), scale, scale), how), device)
        rates.append(2 * size**3 / product.median)
    return max(rates)
