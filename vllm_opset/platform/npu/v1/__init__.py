"""What serves vLLM's first model runner alone on an NPU, and goes with it. It is imported where that runner is built."""
