"""Attention over a paged KV cache. `paged_batch` is not an op: it defines the argument type that describes a batch."""
