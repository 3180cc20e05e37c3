"""Every difference between the vLLM releases that are served (0.26 to 0.33), and everything that is changed in place.

Each is one function that says why it is there, which releases need it and when it can go. Differences are found by
looking at what vLLM offers, never by its version. Loading the plugin changes nothing else: a test compares.
"""

import torch


def without_accelerator() -> None:
    """Lets PyTorch's accelerator clean-up be called on a machine without an accelerator.

    vLLM's `cleanup_dist_env_and_memory` calls `torch.accelerator.empty_host_cache` at shutdown unless the platform is
    its own CPU platform, and PyTorch raises where there is no accelerator. Needed by 0.26 to 0.33, in every process.
    Goes when vLLM asks for an accelerator before it cleans one up.
    """
    if torch.accelerator.current_accelerator() is None:
        torch.accelerator.empty_host_cache = _nothing


def _nothing() -> None:
    pass
