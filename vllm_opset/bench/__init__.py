"""How fast: device time of kernels and their peers, beside the ceilings of the machine, measured in the same run."""
