"""Draws of tokens from logits. `philox` is no op: it is the random number generator that all draws share."""
