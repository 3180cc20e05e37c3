"""Mixture of experts: the choice of experts for each token, and the work of the chosen experts."""
