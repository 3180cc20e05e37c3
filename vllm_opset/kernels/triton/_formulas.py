"""The formulas of the activations, on fp32 values. Named after their ops; see there for the mathematics.

tanh is written as a sigmoid: (1 + tanh(u)) / 2 = sigmoid(2u), which neither cancels nor needs a library function.
"""

import triton
import triton.language as tl

SQRT_HALF = tl.constexpr(0.7071067811865476)
SQRT_8_OVER_PI = tl.constexpr(1.5957691216057308)


@triton.jit
def silu_and_mul(gate, up):
    return gate * tl.sigmoid(gate) * up


@triton.jit
def mul_and_silu(up, gate):
    return gate * tl.sigmoid(gate) * up


@triton.jit
def silu_and_mul_with_clamp(gate, up, limit, alpha, beta):
    gate = tl.minimum(gate, limit)
    up = tl.maximum(tl.minimum(up, limit), -limit)
    return gate * tl.sigmoid(alpha * gate) * (up + beta)


@triton.jit
def gelu(x):
    return 0.5 * x * (1 + tl.erf(x * SQRT_HALF))


@triton.jit
def gelu_tanh(x):
    return x * tl.sigmoid(x * (1 + 0.044715 * x * x) * SQRT_8_OVER_PI)


@triton.jit
def gelu_and_mul(gate, up):
    return gelu(gate) * up


@triton.jit
def gelu_tanh_and_mul(gate, up):
    return gelu_tanh(gate) * up


@triton.jit
def quick_gelu(x):
    return x * tl.sigmoid(1.702 * x)


@triton.jit
def relu2(x):
    x = tl.maximum(x, 0.0)
    return x * x
