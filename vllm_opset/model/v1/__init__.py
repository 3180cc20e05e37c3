"""What serves vLLM's first model runner alone, and goes with it. It is imported where that runner is built."""
