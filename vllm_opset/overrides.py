"""The user's settings for vllm-opset, and errors for those that are not valid.

There are three sources. `--additional-config '{"opset": {"kernels": {"rms_norm": "reference"}}}'` comes before a YAML
file with the same keys, which OPSET_CONFIG names. That file comes before variables such as
OPSET_KERNELS="rms_norm=reference,paged_attention=cpu". An unknown variable or key, a name that occurs twice and a value
that cannot be read are errors. On stock vLLM, an override of an op that vLLM's own code computes has no effect, and a
warning says so (`platform/overridden.py`).
"""

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import yaml

# Environment variables for users. docs/configuration.md explains each.
VARIABLES = (
    "OPSET_CACHE",
    "OPSET_CONFIG",
    "OPSET_COUNT_CALLS",
    "OPSET_IMPORT",
    "OPSET_KERNELS",
    "OPSET_NATIVE",
    "OPSET_NUM_THREADS",
    "OPSET_PLATFORM",
)
# Variables that opset and its benchmarks set for their own processes.
INTERNAL = ("OPSET_COMMIT", "OPSET_SET_BREAKABLE_CUDAGRAPH")
# The keys of the settings. platform/native/parts.py reads `native`.
CONFIG_KEYS = ("kernels", "native")
PAIR = {"OPSET_KERNELS": "op=kernel", "OPSET_NATIVE": "part=on"}
# Our key of vLLM's additional configuration, and its likely misspellings. Other packages may use other keys, so only a
# key as close as "opsett" is an error.
OURS = "opset"
OURS_PERHAPS, CLOSE = (OURS, "vllm-opset", "vllm_opset"), 0.8


class OverrideError(ValueError):
    """An override that cannot be read, names nothing known, or names a kernel that does not support the problem."""


def check(additional_config: Mapping) -> None:
    """Raise OverrideError for an unknown variable or key. additional_config: vLLM's own."""
    for variable in os.environ:
        if variable.startswith("OPSET_") and variable not in (*VARIABLES, *INTERNAL):
            raise OverrideError(
                f"{variable} is no variable of vllm-opset; {nearest(variable, VARIABLES)} Correct it, or unset it"
            )
    for key in additional_config:
        if key in CONFIG_KEYS:
            raise OverrideError(f'--additional-config: {key!r} belongs under "opset": {{"opset": {{"{key}": ...}}}}')
        if key != OURS and difflib.get_close_matches(str(key).lower(), OURS_PERHAPS, cutoff=CLOSE):
            raise OverrideError(f"--additional-config: unknown key {key!r}; did you mean {OURS!r}?")
    counts_calls()


def counts_calls() -> bool:
    """Whether to count the calls of every kernel. Raises OverrideError for a value other than 0 and 1."""
    value = os.environ.get("OPSET_COUNT_CALLS") or "0"
    if value not in ("0", "1"):
        raise OverrideError(f"OPSET_COUNT_CALLS is 1 or 0, not {value!r}")
    return value == "1"


def settings(key: str, additional_config: Mapping) -> Iterator[tuple[str, object, object]]:
    """(source, name, value) for each setting under one of CONFIG_KEYS. A later one overrides an earlier one."""
    variable = f"OPSET_{key.upper()}"
    sources = {variable: {key: _pairs(variable)}}
    if path := os.environ.get("OPSET_CONFIG"):
        sources[f"OPSET_CONFIG ({path})"] = _read_yaml(path)
    sources["--additional-config"] = additional_config.get(OURS, {})
    for source, config in sources.items():
        for other in _mapping(source, config):
            if other not in CONFIG_KEYS:
                raise OverrideError(f"{source}: unknown key {other!r}; {nearest(str(other), CONFIG_KEYS)}")
        for name, value in _mapping(f"{source}: {key}", config.get(key, {})).items():
            yield source, name, value


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for the end of an error about an unknown name: the nearest known name, or all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def comma_separated(variable: str) -> list[str]:
    """The entries of an environment variable that lists them between commas."""
    return [entry.strip() for entry in os.environ.get(variable, "").split(",") if entry.strip()]


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses a key that occurs twice in a mapping. YAML would silently keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                twice = f"{key!r} is there twice; keep one"
                raise yaml.constructor.ConstructorError(problem=twice, problem_mark=key_node.start_mark)
            seen.append(key)
        return super().construct_mapping(node, deep)


def _read_yaml(path: str) -> Mapping:
    try:
        return yaml.load(Path(path).read_text(), _Loader) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise OverrideError(f"OPSET_CONFIG: cannot read {path}: {error}") from error


def _mapping(source: str, value: object) -> Mapping:
    if not isinstance(value, Mapping):
        raise OverrideError(f"{source}: expected keys with values, not {value!r}")
    return value


def _pairs(variable: str) -> dict[str, str]:
    pairs = {}
    for entry in comma_separated(variable):
        name, separator, value = (part.strip() for part in entry.partition("="))
        if not separator:
            raise OverrideError(f"{variable}: {entry!r} is not of the form {PAIR[variable]}")
        if name in pairs:
            raise OverrideError(f"{variable}: {name} is there twice; keep one")
        pairs[name] = value
    return pairs
