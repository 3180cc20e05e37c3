"""Draws of tokens from logits. `philox` is not an op: it is the random number generator that all draws share."""
