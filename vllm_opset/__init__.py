"""vllm-opset: a vLLM hardware plugin. vLLM decides when something is computed; this package decides how.

ops/        WHAT   one contract per op; the reference in plain PyTorch is its body
kernels/    HOW    one file per op and provider
selection   WHICH  one kernel per op, chosen once, with the reason
attention/, platform/   the only rooms that know vLLM
"""

__version__ = "0.1.0"
