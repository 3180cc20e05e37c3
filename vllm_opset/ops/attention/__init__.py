"""Attention over a paged KV cache. `paged_batch` is no op: it holds the type of the argument that describes a batch."""
