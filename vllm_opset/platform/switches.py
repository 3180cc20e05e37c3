"""The user's switches for the parts on stock vLLM: `native` in the configuration or a file, or OPSET_NATIVE.

`native.parts` says what each part is. Every platform reads the switches, so that a wrong one is an error on each.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from vllm_opset.overrides import OverrideError, nearest, settings


class ByPart(NamedTuple):
    """A value for each part. The fields are the names of the parts."""

    attention: Any
    sampler: Any
    linear: Any
    ops: Any
    moe: Any


PARTS = ByPart._fields
VALUES: Mapping[object, bool] = {"on": True, "off": False, True: True, False: False}


class Switch(NamedTuple):
    """on: whether the user wants the part. source: the setting that says so."""

    on: bool
    source: str


def read(additional_config: Mapping) -> dict[str, Switch]:
    """The user's switch of each part that has one. Raises OverrideError for an unknown part or value."""
    switches = {}
    for source, name, value in settings("native", additional_config):
        if name not in PARTS:
            raise OverrideError(f"{source}: unknown part {name!r}; {nearest(str(name), PARTS)}")
        if not isinstance(value, str | bool) or value not in VALUES:
            raise OverrideError(f"{source}: {name} is on or off, not {value!r}")
        switches[name] = Switch(VALUES[value], source)
    return switches
