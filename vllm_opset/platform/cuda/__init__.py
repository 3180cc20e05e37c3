"""vLLM without compiled kernels on NVIDIA GPUs."""
