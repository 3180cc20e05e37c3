"""changes.py PLATFORM ...: prints as JSON the attributes of vLLM, PyTorch and Triton that the plugin changes there.

`loading`: those that loading the plugin changes. `worker`: those that its worker changes afterwards. Each platform has
a process of its own. It is forked after vLLM was imported, because the import takes most of the time. On a machine
without a GPU, the platforms for GPUs are told that one is there.
"""

import contextlib
import importlib
import itertools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Iterator

import torch

# Imported before the plugin is loaded, so that its changes to them are visible. A release may lack some.
MODULES = (
    "vllm.engine.arg_utils",
    "vllm.entrypoints.llm",
    "vllm.kernels",
    "vllm.model_executor.hw_agnostic.layers.activation",
    "vllm.model_executor.hw_agnostic.layers.layernorm",
    "vllm.model_executor.layers.quantization.auto_awq",
    "vllm.model_executor.layers.quantization.auto_gptq",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.layers.rotary_embedding",
    "vllm.model_executor.models.gemma2",
    "vllm.model_executor.models.llama",
    "vllm.triton_utils.dispatcher",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.gpu_worker",
)
WITHOUT_KERNELS = ("cpu", "cuda", "npu")
WATCHED = ("vllm", "torch", "torch.accelerator", "torch.cuda", "triton.runtime.jit")
# Operators of vLLM's compiled kernels. vLLM and this package add operators of their own to other namespaces.
COMPILED = "_C"
# Triton's record of all kernels, which grows when a module with kernels is imported.
KERNELS = "triton.runtime.jit._triton_jit_function_registry"

# Triton kernels of vLLM's second model runner. vLLM itself puts what its registry has in their places.
LAUNCHED = re.compile(r"vllm\.v1\.worker\.gpu\..*_kernel")


Changes = dict[str, set[str]]


def found(*platforms: str, **variables: str) -> dict[str, Changes]:
    """What this script prints. variables: of its environment."""
    command, environment = [sys.executable, __file__, *platforms], os.environ | variables
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert process.returncode == 0, process.stderr[-4000:]
    printed = json.loads(process.stdout.splitlines()[-1])
    return {one: {when: set(names) for when, names in changed.items()} for one, changed in printed.items()}


def declared(platform: str) -> Changes:
    """The same for a platform by the bridges that the installed vLLM needs."""
    from vllm_opset.platform.differences import BRIDGES

    needed = [bridge for bridge in BRIDGES if bridge.needed()]
    return {
        when: {name for bridge in needed if platform in getattr(bridge, when) for name in bridge.changes}
        for when in ("loading", "worker")
    }


# Keeps the values alive that were seen, so that an `id` never refers to two objects.
_seen: list = []


def snapshot() -> dict[str, tuple]:
    """Identifies every signal's handler, and every attribute of watched modules and their classes and objects."""
    from vllm import triton_utils

    values = {f"signal.{number.name}": identity(signal.getsignal(number)) for number in signal.Signals}
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and (name in WATCHED or name.startswith("vllm.")):
            for attribute, value in members(module):
                values[f"{name}.{attribute}"] = identity(value)
                if belongs_to_vllm(value, name):
                    for inner, inner_value in members(value):
                        values[f"{name}.{attribute}.{inner}"] = identity(inner_value)
    # Where Triton is of no use, vLLM puts an object in its place, and many modules hold that object.
    # An import of Triton's own modules is no change.
    values |= {
        f"vllm.triton_utils.triton.{name}": identity(value)
        for name, value in members(triton_utils.triton)
        if not getattr(value, "__name__", "").startswith("triton.")
    }
    operators = (name.split("::") for name in torch._C._dispatch_get_all_op_names())
    return values | {f"torch.ops._C.{name}": () for namespace, name in operators if namespace == COMPILED}


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


def differ(before: dict[str, tuple], after: dict[str, tuple]) -> list[str]:
    # If the plugin is the first to import a module, all of it is new. That is not a change.
    owners = {name.rsplit(".", 1)[0] for name in before} | {f"torch.ops.{COMPILED}"}
    added = {name for name in after.keys() - before.keys() if name.rsplit(".", 1)[0] in owners}
    imported = {name for name in added if name in sys.modules}
    changed = {name for name in before.keys() & after.keys() if before[name] != after[name]}
    return sorted(name for name in (changed | added) - imported - {KERNELS} if not LAUNCHED.fullmatch(name))


def load_plugin(platform: str) -> None:
    os.environ["OPSET_PLATFORM"] = platform
    import vllm.platforms

    vllm.platforms._current_platform = None
    from vllm.platforms import current_platform

    import vllm_opset.platform
    from vllm_opset.platform.bridges import has

    current_platform.pre_register_and_update()
    vllm_opset.platform.register()
    current_platform.import_kernels()
    if has("vllm.ir.ops")():
        current_platform.import_ir_kernels()
    importlib.import_module(f"vllm_opset.platform.{platform}.worker")
    importlib.import_module("vllm_opset.attention.backend")


@contextlib.contextmanager
def in_a_worker(platform: str) -> Iterator[None]:
    """Makes the changes of a worker that loads a model and warms up."""
    from vllm_opset.platform import compat, expert_loading, second_runner

    compat.forget_shared_layers()
    expert_loading.check_shapes(types.SimpleNamespace(architectures=["GptOssForCausalLM"]))
    if platform in WITHOUT_KERNELS:
        from vllm_opset.model import experts
        from vllm_opset.platform.v1 import input_batch

        experts.register()
        expert_loading.refuse_unserved_experts()
        input_batch.keep_allowed_tokens_apart()
    with contextlib.ExitStack() as until_the_end:
        if platform in WITHOUT_KERNELS:
            from vllm_opset.platform import quantised_weights

            quantised_weights.register(types.SimpleNamespace(quantization="compressed-tensors", is_moe=True))
            if platform != "npu":  # which refuses gpt-oss with MXFP4 experts
                quantised_weights.configure_mxfp4()
        if platform in ("cpu", "npu") and second_runner.replaces_triton_kernels():
            serve_with_second_runner(platform)
        if platform == "npu":
            from vllm_opset.platform.npu import graphs

            compat.name_npu_as_cuda(graphs.DecodeGraph, graphs.capture)
        if platform == "cuda":
            compat.break_graphs_at_attention()
            second_runner.view_pinned_memory(torch.clone)
        if platform in ("cuda", "npu"):
            until_the_end.enter_context(compat.own_warm_up(print))
        if platform == "native":
            from vllm_opset.platform import quantised_weights
            from vllm_opset.platform.native.worker import _opset_layers

            until_the_end.enter_context(_opset_layers())
            until_the_end.enter_context(quantised_weights.linear_kernels_first())
            checkpoint = types.SimpleNamespace(quantization_config=None)
            model = types.SimpleNamespace(quantization=quantised_weights.GPT_OSS, model_arch_config=checkpoint)
            config = types.SimpleNamespace(model_config=model, speculative_config=None)
            until_the_end.enter_context(quantised_weights.replaced_expert_methods(config))
        if platform in ("cuda", "native"):
            from vllm_opset.kernels.triton._precompile import precompile

            until_the_end.enter_context(precompile())
        yield


def serve_with_second_runner(platform: str) -> None:
    """Makes the changes of a worker on a CPU or an NPU that serves with vLLM's second model runner."""
    from vllm_opset.platform import second_runner

    second_runner.launch_without_triton()
    if platform == "cpu":
        second_runner.name_cpu_as_cuda()
        second_runner.draft_without_triton()
        second_runner.record_no_stream()
    else:
        second_runner.copy_to_device()
    importlib.import_module(f"vllm_opset.platform.{platform}.runner_kernels").REGISTRY.register()


def pretend_a_gpu() -> None:
    """Let the platforms for GPUs be loaded without one, and `native` without vLLM's compiled kernels."""
    import vllm_opset.platform
    from vllm_opset.platform import stock

    vllm_opset.platform._why_no_gpu = lambda choice: None
    stock.has_kernels_for_cuda = lambda: True
    sys.modules |= {name: types.ModuleType(name) for name in ("vllm._C", "vllm._C_stable_libtorch")}


def changes(platform: str) -> dict[str, list[str]]:
    """Loads the plugin in this process."""
    from vllm.model_executor.layers import activation, rotary_embedding

    if platform in ("cuda", "native") and not torch.cuda.is_available():
        pretend_a_gpu()
    before = snapshot()
    load_plugin(platform)
    loaded = snapshot()
    activations = activation._ACTIVATION_REGISTRY, activation._ACTIVATION_AND_MUL_REGISTRY
    for shared in (rotary_embedding._ROPE_DICT, *(cache._dict for cache in activations)):
        shared["of another model"] = None
    if platform in WITHOUT_KERNELS:
        # vLLM's modules of experts, with the layers that they register. No other platform registers a method. The
        # module of n-gram drafts.
        from vllm_opset.platform import quantised_layers, quantised_loading, second_runner

        loaded_by = (*quantised_loading.EXPERTS_METHODS, *quantised_loading.BEGIN_ONLINE)
        methods = (name.rsplit(".", 1)[0] for name in loaded_by)
        oracles = (name.rsplit(".", 1)[0] for name in quantised_layers.register_quantised_experts.bridge.changes)
        patches = quantised_layers.serve_int4_experts, quantised_layers.serve_int4_experts_without_marlin
        needed = (patch.bridge.changes for patch in patches if patch.bridge.needed())
        int4 = (name.rsplit(".", 1)[0] for name in itertools.chain(*needed))
        ngrams = [second_runner.NGRAMS] if second_runner.drafts_without_triton() else []
        for module in ("vllm_opset.model.quantised_experts", *oracles, *methods, *int4, *ngrams):
            importlib.import_module(module)
    importlib.import_module("vllm.model_executor.models.gpt_oss")  # which also imports vLLM's modules of experts
    os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"  # as when the configuration captures graphs in pieces
    another_model = snapshot()
    with in_a_worker(platform):
        worker = snapshot()
    return {"loading": differ(before, loaded), "worker": differ(another_model, worker)}


def main(*platforms: str) -> None:
    os.environ["OPSET_PLATFORM"] = "off"
    for module in MODULES:
        if importlib.util.find_spec(".".join(module.split(".")[:3])) is not None:
            importlib.import_module(module)
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        print(json.dumps(dict(zip(platforms, pool.map(changes, platforms, chunksize=1), strict=True))))


if __name__ == "__main__":
    main(*sys.argv[1:])
