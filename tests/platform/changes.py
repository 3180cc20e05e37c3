"""Prints, as JSON, the attributes of vLLM and PyTorch that loading the plugin changes. Run in a process of its own."""

import importlib
import json
import os
import signal
import sys
import types
from collections.abc import Iterator

# Imported before the plugin is loaded, so that its changes to them are visible.
MODULES = (
    "vllm.engine.arg_utils",
    "vllm.entrypoints.llm",
    "vllm.kernels",
    "vllm.model_executor.hw_agnostic.layers.activation",
    "vllm.model_executor.hw_agnostic.layers.layernorm",
    "vllm.model_executor.layers.rotary_embedding",
    "vllm.model_executor.models.gemma2",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.gpu_worker",
)
WATCHED = ("vllm", "torch", "torch.accelerator", "torch.cuda")

# Keeps the values alive that were seen, so that an `id` never refers to two objects.
_seen: list = []


def snapshot() -> dict[str, tuple]:
    """Identifies every signal's handler, and every attribute of watched modules and their classes and objects."""
    values = {f"signal.{number.name}": identity(signal.getsignal(number)) for number in signal.Signals}
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and (name in WATCHED or name.startswith("vllm.")):
            for attribute, value in members(module):
                values[f"{name}.{attribute}"] = identity(value)
                if belongs_to_vllm(value, name):
                    for inner, inner_value in members(value):
                        values[f"{name}.{attribute}.{inner}"] = identity(inner_value)
    return values


def members(owner) -> Iterator[tuple[str, object]]:
    for name, value in list(vars(owner).items()):
        if not name.startswith("__") or name in ("__init__", "__new__", "__call__", "__getattr__"):
            _seen.append(value)
            yield name, value


def belongs_to_vllm(value, module: str) -> bool:
    """Whether it is a class of this module, or an object of one of vLLM's classes."""
    if isinstance(value, type):
        return value.__module__ == module
    plain = isinstance(value, types.FunctionType | types.ModuleType)
    return not plain and hasattr(value, "__dict__") and type(value).__module__.startswith("vllm")


def identity(value) -> tuple:
    if isinstance(value, dict):
        return id(value), *((repr(key), id(item)) for key, item in value.items())
    if isinstance(value, list | set | tuple):
        return id(value), *map(id, value)
    return (id(value),)


def load_plugin() -> None:
    os.environ["OPSET_PLATFORM"] = "cpu"
    import vllm.platforms

    vllm.platforms._current_platform = None
    from vllm.platforms import current_platform

    import vllm_opset.platform

    current_platform.pre_register_and_update()
    vllm_opset.platform.register()
    current_platform.import_ir_kernels()
    importlib.import_module("vllm_opset.platform.cpu.worker")
    importlib.import_module("vllm_opset.attention.backend")


def main() -> None:
    os.environ["OPSET_PLATFORM"] = "off"
    for module in MODULES:
        if importlib.util.find_spec(".".join(module.split(".")[:3])) is not None:
            importlib.import_module(module)
    before = snapshot()
    load_plugin()
    after = snapshot()
    # If the plugin is the first to import a module, all of it is new. That is not a change.
    modules = {name.rsplit(".", 1)[0] for name in before}
    added = {name for name in after.keys() - before.keys() if name.rsplit(".", 1)[0] in modules}
    changed = {name for name in before.keys() & after.keys() if before[name] != after[name]}
    print(json.dumps(sorted(changed | added)))


if __name__ == "__main__":
    main()
