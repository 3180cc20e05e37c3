"""vLLM with the plugin, in this process."""

from plugin import registered  # noqa: F401
