"""The formulas of the activations, on fp32 values. Named after their ops; see there for the mathematics."""

import triton
import triton.language as tl


@triton.jit
def silu(x):
    return x / (1 + tl.exp(-x))


@triton.jit
def silu_and_mul(gate, up):
    return silu(gate) * up
