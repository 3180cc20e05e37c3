"""The formulas of the activations, on fp32 values. They are named after their ops, which document the mathematics.

In gelu, tanh is written as a sigmoid: (1 + tanh(u)) / 2 = sigmoid(2u). A sigmoid does not cancel and needs no library
function.
"""

import triton
import triton.language as tl

HALF_SQRT_HALF = tl.constexpr(0.3535533905932738)
SQRT_8_OVER_PI = tl.constexpr(1.5957691216057308)
TANH_SERIES = tl.constexpr(0.25)  # up to here the series of tanh is exact to 1e-7


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
    """x · Φ(x), where Φ is the normal distribution function, computed from its tail beyond |x|.

    The tail is erfc(z) / 2 = t/2 · exp(P(t) − z²) at z = |x| / √2, with t = 1 / (1 + z/2). P was fitted by Chebyshev
    interpolation on z up to 10. The relative error is 2.4e-7 in fp32, where 1 + erf would cancel, and it takes half the
    instructions.
    """
    t = 1 / (1 + tl.abs(x) * HALF_SQRT_HALF)
    p = -0.68082718 + t * 0.14493021
    p = -0.6962519 + t * (1.15673376 + t * p)
    p = 0.00126759 + t * (-0.08028043 + t * p)
    p = 0.38664041 + t * (0.0346028 + t * p)
    p = -1.265448 + t * (0.99863278 + t * p)
    tail = 0.5 * t * tl.exp(p - 0.5 * x * x)
    return x * tl.where(x < 0, tail, 1 - tail)


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
def fatrelu_and_mul(gate, up, threshold):
    return tl.where(gate <= threshold, 0.0, gate) * up


@triton.jit
def swiglustep_and_mul(gate, up, limit):
    return tl.minimum(gate * tl.sigmoid(gate), limit) * tl.maximum(tl.minimum(up, limit), -limit)


@triton.jit
def tanh(x):
    """tanh from exp(−2|x|), or from its series for small values, where the exponential would cancel.

    The relative error is 3e-7.
    """
    e = tl.exp(-2 * tl.abs(x))
    far = tl.where(x < 0, e - 1, 1 - e) / (1 + e)
    square = x * x
    near = x * (1 + square * (-0.33333334 + square * (0.13333334 - square * 0.053968254)))
    return tl.where(tl.abs(x) < TANH_SERIES, near, far)


@triton.jit
def situ_and_mul(gate, up, beta):
    return beta * tanh(gate / beta) * tl.sigmoid(gate) * up


@triton.jit
def situ_and_mul_with_limit(gate, up, beta, linear_beta):
    return situ_and_mul(gate, linear_beta * tanh(up / linear_beta), beta)


@triton.jit
def quick_gelu(x):
    return x * tl.sigmoid(1.702 * x)


@triton.jit
def relu2(x):
    x = tl.maximum(x, 0.0)
    return x * x


@triton.jit
def formula(NAME: tl.constexpr, values, parameters):
    """Applies the formula of that name.

    A kernel receives the name instead of the function, because tools that report compilations, such as vLLM's monitor,
    print the constants of a kernel.
    """
    if NAME == "silu_and_mul":
        return silu_and_mul(*values)
    elif NAME == "mul_and_silu":
        return mul_and_silu(*values)
    elif NAME == "silu_and_mul_with_clamp":
        return silu_and_mul_with_clamp(*values, *parameters)
    elif NAME == "fatrelu_and_mul":
        return fatrelu_and_mul(*values, *parameters)
    elif NAME == "swiglustep_and_mul":
        return swiglustep_and_mul(*values, *parameters)
    elif NAME == "situ_and_mul":
        return situ_and_mul(*values, *parameters)
    elif NAME == "situ_and_mul_with_limit":
        return situ_and_mul_with_limit(*values, *parameters)
    elif NAME == "gelu_and_mul":
        return gelu_and_mul(*values)
    elif NAME == "gelu_tanh_and_mul":
        return gelu_tanh_and_mul(*values)
    elif NAME == "gelu":
        return gelu(*values)
    elif NAME == "gelu_tanh":
        return gelu_tanh(*values)
    elif NAME == "quick_gelu":
        return quick_gelu(*values)
    else:
        tl.static_assert(NAME == "relu2", "there is no formula of that name")
        return relu2(*values)
