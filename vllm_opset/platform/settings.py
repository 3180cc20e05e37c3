"""Settings of vLLM's configuration that a user has changed, and their flags on vLLM's command line."""

from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def changed(config: "VllmConfig", part: str) -> list[str]:
    """Names of the settings that a user turned on: their value is neither vLLM's default nor off (None or False).

    part: the path to the settings in the configuration, such as "compilation_config.pass_config".
    """
    settings = attrgetter(part)(config)
    defaults = type(settings)()
    values = {field.name: getattr(settings, field.name) for field in fields(settings) if field.init}
    return [name for name, value in values.items() if not _is_off(value) and value != getattr(defaults, name)]


def _is_off(value: object) -> bool:
    return value is None or value is False  # 0 equals False, but is a number that a user chose


def flag(part: str, name: str) -> str:
    """The flag of vLLM's command line for a setting: its own flag if it has one, else a key of its part's flag."""
    from vllm.engine.arg_utils import EngineArgs

    if name in {field.name for field in fields(EngineArgs)}:
        return f"--{name.replace('_', '-')}"
    outer, *inner = part.split(".")
    return ".".join([f"--{outer.replace('_', '-')}", *inner, name])
