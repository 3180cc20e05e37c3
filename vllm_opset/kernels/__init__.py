"""HOW: a folder per provider, in each a file per op. A provider's `__init__` says on which devices it runs and whether
it can be had on this machine; nothing else lives here.
"""
