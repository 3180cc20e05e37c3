"""This module reads what users say to vllm-opset, and refuses what means nothing.

Most specific first: `--additional-config '{"opset": {"kernels": {"rms_norm": "reference"}}}'`, a YAML file with the
same keys that OPSET_CONFIG names, and variables such as OPSET_KERNELS="rms_norm=reference,paged_attention=cpu". No word
is ignored: an unknown variable or key, a name that is there twice and a value that cannot be read are errors.
"""

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import yaml

# Of the environment, for users. The README says what each is for.
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
# What opset and its benchmarks say to their own processes.
INTERNAL = ("OPSET_COMMIT", "OPSET_SET_BREAKABLE_CUDAGRAPH")
# What users can say something about; `native` is for platform/native/parts.py.
CONFIG_KEYS = ("kernels", "native")
PAIR = {"OPSET_KERNELS": "op=kernel", "OPSET_NATIVE": "part=on"}
# The key of vLLM's additional configuration that is ours, and how it is misspelled. Its other keys are other people's:
# only one as close as "opsett" is an error.
OURS = "opset"
OURS_PERHAPS, CLOSE = (OURS, "vllm-opset", "vllm_opset"), 0.8


class OverrideError(ValueError):
    """An override that cannot be read, names nothing, or names a kernel that cannot do what is asked of it."""


def check(additional_config: Mapping) -> None:
    """Raises OverrideError for a variable or key that means nothing. additional_config: vLLM's own."""
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
    """Whether the calls of every kernel are counted. Raises OverrideError for another value than 0 and 1."""
    value = os.environ.get("OPSET_COUNT_CALLS") or "0"
    if value not in ("0", "1"):
        raise OverrideError(f"OPSET_COUNT_CALLS is 1 or 0, not {value!r}")
    return value == "1"


def said(key: str, additional_config: Mapping) -> Iterator[tuple[str, object, object]]:
    """(source, name, value) for all that users say under one of CONFIG_KEYS, what counts most last."""
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
    """A hint to close an error about an unknown name: the nearest known ones, or all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def words(variable: str) -> list[str]:
    """Those between the commas of a variable of the environment."""
    return [word.strip() for word in os.environ.get(variable, "").split(",") if word.strip()]


class _Loader(yaml.SafeLoader):
    """Refuses a key that a mapping has twice, of which the last would count."""

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
    except (OSError, yaml.YAMLError) as error:
        raise OverrideError(f"OPSET_CONFIG: cannot read {path}: {error}") from error


def _mapping(source: str, value: object) -> Mapping:
    if not isinstance(value, Mapping):
        raise OverrideError(f"{source}: expected keys with values, not {value!r}")
    return value


def _pairs(variable: str) -> dict[str, str]:
    pairs = {}
    for word in words(variable):
        name, separator, value = (part.strip() for part in word.partition("="))
        if not separator:
            raise OverrideError(f"{variable}: {word!r} is not of the form {PAIR[variable]}")
        if name in pairs:
            raise OverrideError(f"{variable}: {name} is there twice; keep one")
        pairs[name] = value
    return pairs
