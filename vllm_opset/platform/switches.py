"""What users say of the parts that can be switched on stock vLLM: `native` in the configuration, a file or a variable.

`native.parts` says what each part is. The words are read on every platform, so that a wrong one is an error on each.
"""

from collections.abc import Mapping
from typing import NamedTuple

from vllm_opset import selection

PARTS = ("attention", "sampler", "linear", "ops")
VALUES: Mapping[object, bool] = {"on": True, "off": False, True: True, False: False}


class Switch(NamedTuple):
    """on: whether the user wants the part. source: where that was said."""

    on: bool
    source: str


def read(additional_config: Mapping) -> dict[str, Switch]:
    """The user's switch of each part that has one. Raises OverrideError for a wrong word."""
    switches = {}
    for source, name, value in selection.said("native", additional_config):
        if name not in PARTS:
            raise selection.OverrideError(f"{source}: unknown part {name!r}; {selection.nearest(str(name), PARTS)}")
        if not isinstance(value, str | bool) or value not in VALUES:
            raise selection.OverrideError(f"{source}: {name} is on or off, not {value!r}")
        switches[name] = Switch(VALUES[value], source)
    return switches
