"""vLLM on a CPU."""
