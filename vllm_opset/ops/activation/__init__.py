"""Activations, gated and plain."""
