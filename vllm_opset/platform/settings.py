"""Settings of vLLM's configuration that a user has changed, and their flags on vLLM's command line."""

from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OFF = (None, False)


def changed(config: "VllmConfig", part: str) -> list[str]:
    """Names of the settings that ask for something: their value is neither vLLM's default nor off.

    part: where they are in the configuration, such as "compilation_config.pass_config".
    """
    settings = attrgetter(part)(config)
    defaults = type(settings)()
    return [
        field.name
        for field in fields(settings)
        if field.init and getattr(settings, field.name) not in (*OFF, getattr(defaults, field.name))
    ]


def flag(part: str, name: str) -> str:
    """The flag of vLLM's command line that sets it: one of its own, or else a key of its part's."""
    from vllm.engine.arg_utils import EngineArgs

    if name in {field.name for field in fields(EngineArgs)}:
        return f"--{name.replace('_', '-')}"
    outer, *inner = part.split(".")
    return ".".join([f"--{outer.replace('_', '-')}", *inner, name])
