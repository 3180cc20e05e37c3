"""The measured ceilings of this machine: the rate of reading memory, and the rate of multiplying matrices."""

from dataclasses import dataclass

import torch

from vllm_opset.bench.timing import time_call
from vllm_opset.ops.contract import Cost

READ_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}  # many times the last-level cache
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}


@dataclass(frozen=True)
class Ceilings:
    """bytes_per_second: of reading memory. flops_per_second: of a matrix product in `dtype`, on random data."""

    bytes_per_second: float
    flops_per_second: float
    dtype: torch.dtype

    def floor(self, cost: Cost) -> float:
        """The least seconds that a call of this cost can take."""
        return max(cost.bytes / self.bytes_per_second, cost.flops / self.flops_per_second)


def measure(device: str, dtype: torch.dtype) -> Ceilings:
    """Measure both ceilings, on idle hardware, in about a second."""
    buffer = torch.randn(READ_BYTES[device] // 4, device=device)
    reading = time_call(torch.sum, ((buffer,), {}), device)
    size = MATMUL_SIZE[device]
    factors = tuple(torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = time_call(torch.matmul, (factors, {}), device)
    return Ceilings(buffer.nbytes / reading.median, 2 * size**3 / product.median, dtype)
