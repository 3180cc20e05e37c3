"""vLLM's own CUDA platform, with its compiled kernels, and with opset's parts where they are better."""
