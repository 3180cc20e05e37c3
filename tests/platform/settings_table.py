"""The tables in `settings/`, and the settings of the installed release of vLLM."""

import sys
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import yaml

FOLDER = Path(__file__).with_name("settings")
PLATFORMS = ("cpu", "cuda", "npu")
VERDICTS = ("honoured", "refused", "late", "vllm", "nothing")
TRIED = ("refused", "late", "vllm")
ALL = "*"


@dataclass(frozen=True)
class Entry:
    """verdict: one of VERDICTS. value: the value to try for a verdict in TRIED; None means any but the default."""

    verdict: str
    value: object = None


@cache
def table(name: str) -> dict:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


def names(entries) -> Iterator[str]:
    """The names in a list, whose items may be lists, or in the values of a mapping from reasons to such lists."""
    if isinstance(entries, str):
        yield entries
    else:
        for inner in entries.values() if isinstance(entries, dict) else entries:
            yield from names(inner)


def read(part: dict) -> dict[str, Entry]:
    """Raises ValueError for a name that occurs twice."""
    entries: dict[str, Entry] = {}
    for verdict in VERDICTS:
        said = part.get(verdict, ())
        values = said if verdict in TRIED and isinstance(said, dict) else dict.fromkeys(names(said))
        if twice := entries.keys() & values.keys():
            raise ValueError(f"twice: {', '.join(twice)}")
        entries |= {name: Entry(verdict, value) for name, value in values.items()}
    return entries


@cache
def entries(owner: str, platform: str) -> dict[str, Entry]:
    """The entries for a class's settings on a platform."""
    part = table("parts").get(owner, {})
    return read(part) | read(part.get(platform, {}))


def entry(owner: str, name: str, platform: str) -> Entry | None:
    said = entries(owner, platform)
    return said.get(name) or said.get(ALL)


@cache
def classes() -> list[type]:
    """The classes of the configuration, VllmConfig first."""
    from vllm.config import VllmConfig

    found = [VllmConfig]
    for owner in found:
        for inner in types_of(owner).values():
            found += [part for part in dataclasses_in(inner) if part not in found]
    return found


@cache
def types_of(owner: type) -> dict[str, object]:
    """The types of the settings that users can set; vLLM may have written them as names."""
    hints = typing.get_type_hints(owner, vars(sys.modules[owner.__module__]))
    return {f.name: hints[f.name] for f in fields(owner) if f.init and not f.name.startswith("_")}


def dataclasses_in(kind) -> Iterator[type]:
    if isinstance(kind, type) and is_dataclass(kind):
        yield kind
    for inner in typing.get_args(kind):
        yield from dataclasses_in(inner)


@cache
def settings(owner: type) -> dict[str, object]:
    """The types of the class's settings. It omits parts with a table of their own and no entry for the whole."""
    own = table("parts").get(owner.__name__, {})
    named = {name for key in (own, *(own.get(platform, {}) for platform in PLATFORMS)) for name in read(key)}
    return {
        name: kind
        for name, kind in types_of(owner).items()
        if name in named or not any(part.__name__ in table("parts") for part in dataclasses_in(kind))
    }


def another(kind, default: object) -> object:
    """A value of that type that is neither the default nor off. Raises TypeError if none can be found."""
    if typing.get_origin(kind) is typing.Literal:
        return next(value for value in typing.get_args(kind) if value not in (default, "auto", "default"))
    if isinstance(kind, type):
        if issubclass(kind, Enum):
            return next(value for value in kind if value is not default)
        if kind is bool and default is not True:
            return True
        if kind in (int, float):
            return (default or 0) + 1
    for inner in typing.get_args(kind):
        if inner is not type(None):
            return another(inner, default)
    raise TypeError(kind)


def refused_variables(*platforms: str) -> dict[str, str]:
    """The variables refused on one of these platforms (by default on any), each with a refused value."""
    groups = table("variables")["refused"].items()
    return {
        name: value
        for where, group in groups
        if set(platforms or PLATFORMS) & set(where.split())
        for name, value in group.items()
    }


def is_listed(variable: str) -> bool:
    return any(fnmatch(variable, known) for known in (*refused_variables(), *names(table("variables")["others"])))
