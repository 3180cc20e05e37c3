"""Replacements for parts of vLLM's model and model runner, on every device."""
