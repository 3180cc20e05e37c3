"""The error for what the plugin does not support."""


class Refusal(NotImplementedError):
    """A feature that is not supported. The message names the cure."""
