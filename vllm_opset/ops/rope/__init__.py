"""Rotary embeddings, alone and fused with what surrounds them."""
