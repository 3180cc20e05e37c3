"""surface.py [MODULE]...: prints as JSON what this package uses of the installed vLLM, for tools/next_release.py.

It maps each of KINDS to names, and each name to a description. A release that is not served yet may break anything, so
an exception becomes the description of the name that raised it. MODULE: one of this package that is left out.
"""

import contextlib
import importlib
import inspect
import json
import pkgutil
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields
from types import ModuleType, SimpleNamespace

import pytest
import torch
from launched_kernels import launched_kernels
from signatures import Calls, is_method, method, overridden, parameters, refused, why_not

import vllm_opset

Said = Iterator[tuple[str, str]]

ALL = "*"  # the name that an exception gets if it ended the whole kind

# vLLM's classes that ask a platform or an attention backend: what is new there may be for opset to answer.
HOOKED = (
    "vllm.platforms.interface.Platform",
    "vllm.v1.attention.backend.AttentionBackend",
    "vllm.v1.attention.backend.AttentionImpl",
    "vllm.v1.attention.backend.AttentionMetadataBuilder",
)


@contextlib.contextmanager
def pretended_devices() -> Iterator[None]:
    """Within this context, the modules for GPUs and NPUs can be imported without them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("vllm._C", "vllm._C_stable_libtorch"):
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.setattr(torch, "npu", SimpleNamespace(NPUGraph=object, graph=object), raising=False)
        yield


def module_names() -> list[str]:
    """All modules of this package, including those for absent devices."""
    names = (module.name for module in pkgutil.walk_packages(vllm_opset.__path__, "vllm_opset."))
    return [name for name in names if not name.endswith("__main__")]


def imports() -> Said:
    """Modules of this package that cannot be imported, and names that they import later and that are missing."""
    for name in module_names():
        try:
            missing = Calls(importlib.import_module(name)).missing
        except Exception as failure:
            yield name, _summary(failure)
        else:
            yield from ((f"{name}: {later}", "missing") for later in sorted(set(missing)))


def signatures() -> Said:
    """The methods of vLLM that a class of this package overrides."""
    for module in _imported():
        for _, name, base in overridden(module):
            yield f"{base.__module__}.{base.__qualname__}.{name}", _signature(method(base, name))


def refusals() -> Said:
    """Calls by vLLM that an overriding method refuses, and calls of vLLM by this package that vLLM refuses."""
    for module in _imported():
        for cls, name, base in overridden(module):
            if calls := refused(method(base, name), method(cls, name)):
                yield f"{cls.__module__}.{cls.__qualname__}.{name}", f"refuses {', '.join(calls)}"
        for line, function, *given in Calls(module).found:
            if reason := why_not(function, *given):
                yield f"{module.__name__}:{line}: {function.__qualname__}", reason


def registrations() -> Said:
    """What the plugin registers with vLLM, as vLLM has it afterwards."""
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_opset.model import registration

    load_general_plugins()
    yield "platform", type(current_platform).__name__
    yield "attention backend", AttentionBackendEnum.CUSTOM.get_path()
    for name in (registration.REGISTRY, registration.HW_AGNOSTIC_REGISTRY):
        registry = getattr(sys.modules.get(name), "op_registry_oot", {})
        yield from ((f"{name}: {op}", cls.__name__) for op, cls in registry.items())


def bridges() -> Said:
    """The bridges, and whether this vLLM needs them."""
    from vllm_opset.platform.differences import BRIDGES

    for bridge in BRIDGES:
        try:
            yield bridge.name, "needed" if bridge.needed() else "not needed"
        except Exception as failure:
            yield bridge.name, _summary(failure)


def configuration() -> Said:
    """The fields of vLLM's configuration, and the arguments of an engine."""
    from settings_table import classes, types_of
    from vllm.engine.arg_utils import AsyncEngineArgs

    for owner in classes():
        yield from ((f"{owner.__name__}.{name}", "") for name in types_of(owner))
    yield from ((f"AsyncEngineArgs.{field.name}", "") for field in fields(AsyncEngineArgs))


def variables() -> Said:
    from vllm import envs

    yield from ((name, "") for name in envs.environment_variables)


def hooks() -> Said:
    """The members of the classes by which vLLM asks a plugin."""
    for name in HOOKED:
        module, _, cls = name.rpartition(".")
        owner = getattr(importlib.import_module(module), cls)
        for member, value in vars(owner).items():
            if not member.startswith("_"):
                yield f"{cls}.{member}", _signature(method(owner, member)) if is_method(value) else ""


def kernels() -> Said:
    """The Triton kernels that vLLM's second model runner launches, with their parameters."""
    yield from ((name, f"({', '.join(parameters)})") for name, parameters in launched_kernels().items())


KINDS: Mapping[str, Callable[[], Said]] = {
    "import": imports,
    "overridden method": signatures,
    "refused call": refusals,
    "registration": registrations,
    "bridge": bridges,
    "setting": configuration,
    "variable": variables,
    "hook": hooks,
    "kernel": kernels,
}


def surface(without: Collection[str] = ()) -> dict[str, dict[str, str]]:
    """without: modules of this package whose classes and calls are left out."""
    _left_out.update(without)
    return {kind: _collected(kind) for kind in KINDS}


_left_out: set[str] = set()


def _collected(kind: str) -> dict[str, str]:
    try:
        return dict(KINDS[kind]())
    except Exception as failure:
        return {ALL: _summary(failure)}


def _imported() -> list[ModuleType]:
    return [sys.modules[name] for name in module_names() if name in sys.modules and name not in _left_out]


def _signature(function: Callable) -> str:
    """The signature without annotations, which no call depends on."""
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters(function)]
    return str(inspect.Signature(bare))


def _summary(failure: Exception) -> str:
    frame = traceback.extract_tb(failure.__traceback__)[-1]
    return f"{type(failure).__name__}: {failure} ({frame.filename.rpartition('site-packages/')[2]}:{frame.lineno})"


if __name__ == "__main__":
    with pretended_devices():
        print(json.dumps(surface(sys.argv[1:])))
