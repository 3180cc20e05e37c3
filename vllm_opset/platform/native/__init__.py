"""vLLM's own CUDA platform, with its compiled kernels, and opset's parts where they are better."""
