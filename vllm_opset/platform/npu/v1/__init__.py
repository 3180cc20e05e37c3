"""This package serves vLLM's first model runner on an NPU, and goes with it. It is imported late."""
