"""vllm-opset: a vLLM hardware plugin. vLLM schedules the computations; this package provides their kernels.

ops/        WHAT   one contract per op, whose body is the reference in plain PyTorch
kernels/    HOW    one file per op and provider
selection   WHICH  one kernel per op, chosen once, with the reason
attention/, platform/   the only parts of the plugin that import vLLM
"""

__version__ = "0.1.0"
