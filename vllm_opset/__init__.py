"""vllm-opset: a vLLM hardware plugin. vLLM schedules the computations; this package provides their kernels.

ops/        WHAT    one contract per op, whose body is the reference in plain PyTorch
kernels/    HOW     one file or package per op and provider
targets     WHERE   vendor, architecture and features of a device
selection   WHICH   one kernel per op, chosen once, with the reason
variants    WHEN    decode or prefill: what a kernel's own table decides for each call
parity      WHETHER a kernel agrees with its op's reference
attention/  vLLM's attention backend
model/      replacements for parts of vLLM's model and model runner
platform/   devices: vLLM's platforms and workers, and every patch of vLLM
bench/      measurements of kernels and of whole engines
cli/        the command `vllm-opset`

docs/architecture.md lists all modules, and which may import which.
"""
