"""Benchmarks: the device time of kernels and their peers, and the machine's ceilings, measured in the same run."""
