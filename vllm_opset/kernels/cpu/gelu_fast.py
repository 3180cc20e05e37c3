"""gelu_fast by PyTorch's own fused operator."""

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.cpu.gelu_new import gelu_new

gelu_fast = kernel(ops.gelu_fast, name="cpu")(gelu_new)
