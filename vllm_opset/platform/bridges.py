"""The registry of bridges: each patch of vLLM, and each difference between its releases that this package handles.

A bridge says which releases need it. A test compares that with its probe on every supported release, and another test
fails once no supported release needs the bridge. docs/changes-to-vllm.md is generated from the registry.
"""

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType

# Platforms, as OPSET_PLATFORM names them. All but `native` run a vLLM without compiled kernels.
WITHOUT_KERNELS = ("cpu", "cuda", "npu")
EVERY = (*WITHOUT_KERNELS, "native")

Release = tuple[int, int]
Probe = Callable[[], bool]

PARAMETERS = "Parameters: "  # begins the paragraph of a patch's docstring that is left out of its reason
_MISSING = object()
_WRAPPED = "_wrapped_by_vllm_opset"


@dataclass(frozen=True)
class Bridge:
    """A patch of vLLM, or code that handles a difference between its releases."""

    name: str  # of the patch, or of what differs
    reason: str  # why it is needed: for a patch, its docstring
    code: str  # the qualified name of the code in this package
    needed: Probe  # looks at modules and signatures of the installed vLLM, never at its version
    first: Release | None = None  # the first release that needs it; None: the oldest that is supported
    last: Release | None = None  # the last release that needs it; None: the newest that is supported
    ends: str = ""  # what has to change in vLLM before it can go, if `last` does not say it
    changes: tuple[str, ...] = ()  # qualified names of the attributes that it changes
    hook: bool = False  # whether vLLM offers these attributes to plugins
    loading: tuple[str, ...] = ()  # platforms on which loading the plugin makes the changes
    configuring: tuple[str, ...] = ()  # platforms on which each configuration of an engine makes them
    worker: tuple[str, ...] = ()  # platforms on which a worker makes them later

    def is_needed_by(self, release: Release) -> bool:
        """Whether a release needs it, as `first` and `last` say."""
        return (self.first or release) <= release <= (self.last or release)


def patch(needed: Probe, *, always: bool = False, **fields) -> Callable[[Callable], Callable]:
    """Make the decorated function a patch that does nothing if this vLLM does not need it.

    Its attribute `bridge` is the Bridge. always: apply it without asking the probe. fields: of Bridge.
    """

    def register(function: Callable) -> Callable:
        @functools.wraps(function)
        def if_needed(*args, **kwargs) -> None:
            if needed():
                function(*args, **kwargs)

        applied = function if always else if_needed
        code = f"{function.__module__}.{function.__qualname__}"
        applied.bridge = Bridge(function.__name__, _reason(function), code, needed, **fields)
        return applied

    return register


def _reason(function: Callable) -> str:
    """The function's docstring without the paragraph about parameters."""
    paragraphs = inspect.getdoc(function).split("\n\n")
    return " ".join(" ".join(text.split()) for text in paragraphs if not text.startswith(PARAMETERS))


def wrap_once(owner: object, name: str, around: Callable[[Callable], Callable]) -> None:
    """Put a function around one of vLLM's, unless this was done before. Other plugins may have wrapped it, too.

    around: takes vLLM's function, and returns the one that takes its place. Another wrapper keeps the mark, because
    functools.wraps copies attributes.
    """
    theirs = getattr(owner, name)
    if hasattr(theirs, _WRAPPED):
        return
    ours = functools.wraps(theirs)(around(theirs))
    setattr(ours, _WRAPPED, True)
    setattr(owner, name, staticmethod(ours) if isinstance(inspect.getattr_static(owner, name), staticmethod) else ours)


# Probes. Each imports vLLM's modules when it is asked.


def has(name: str) -> Probe:
    """Whether vLLM has this module or attribute."""
    return lambda: find(name) is not _MISSING


def lacks(name: str) -> Probe:
    """Whether vLLM has no module or attribute of this name."""
    return lambda: find(name) is _MISSING


def takes(function: str, parameter: str) -> Probe:
    """Whether vLLM's function has a parameter of this name."""
    return lambda: has(function)() and parameter in inspect.signature(find(function)).parameters


def uses(function: str, name: str) -> Probe:
    """Whether the code of vLLM's function uses a global, attribute or string of this name."""
    return lambda: has(function)() and name in _names(inspect.unwrap(find(function)).__code__)


def find(name: str) -> object:
    """The module or attribute of this qualified name, imported if need be; `_MISSING` if there is none."""
    path, value = "", None
    for part in name.split("."):
        parent, path = value, f"{path}.{part}".lstrip(".")
        value = getattr(parent, part, _MISSING)
        is_in_package = parent is None or hasattr(parent, "__path__")
        if value is _MISSING and is_in_package and importlib.util.find_spec(path):
            value = importlib.import_module(path)
        if value is _MISSING:
            break
    return value


def _names(code: CodeType) -> set[str]:
    return {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}
