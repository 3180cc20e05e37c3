"""Quantisation of activations and weights."""
