"""The kernels: one folder per provider, with one file per op.

The `__init__` of a provider says on which devices it runs and whether it is available on this machine. It contains
nothing else.
"""
