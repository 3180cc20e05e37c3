"""Writes to the paged KV cache."""
