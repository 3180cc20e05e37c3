"""The error for what the plugin does not support, and a cure that many of these errors name."""

ANOTHER_MODEL = "choose another model"


class Refusal(NotImplementedError):
    """A feature that is not supported. The message names the cure."""
