"""Code that only vLLM's first model runner needs, to be deleted with it. It is imported where that runner is built."""
