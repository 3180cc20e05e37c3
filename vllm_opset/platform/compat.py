"""The patches of vLLM and PyTorch that belong to no module of their own; `differences` names these modules.

Each is one registered function, whose docstring says why it is needed.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from vllm_opset.platform.bridges import EVERY, WITHOUT_KERNELS, find, has, patch, uses, wrap_once

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

REGISTRY = "vllm.model_executor.models.registry"
LAYERS = "vllm.model_executor.layers"
ACTIVATIONS = "_ACTIVATION_REGISTRY", "_ACTIVATION_AND_MUL_REGISTRY"
# The names of torch.cuda that vLLM's model runner uses.
NAMES_OF_CUDA = ("Event", "Stream", "stream", "current_stream", "default_stream", "set_stream", "synchronize")

_library = torch.library.Library("_C", "FRAGMENT")  # of vLLM's compiled kernels


@patch(
    uses("vllm.distributed.parallel_state.cleanup_dist_env_and_memory", "empty_cache"),
    ends="vLLM checks for an accelerator before this clean-up",
    changes=("torch.accelerator.empty_cache", "torch.accelerator.empty_host_cache"),
    loading=("cpu",),
    always=True,  # vLLM makes its platform while it is being imported, and the probe would import more of it
)
def without_accelerator() -> None:
    """Let vLLM call PyTorch's accelerator clean-up on a machine without an accelerator.

    vLLM's `cleanup_dist_env_and_memory` calls `torch.accelerator.empty_cache` at shutdown. From 0.28 on it also calls
    `empty_host_cache`. vLLM skips both calls only on its own CPU platform. PyTorch raises if there is no accelerator.
    vLLM's model runner for CPUs also replaces `empty_cache`, but with several workers the engine's process has no model
    runner.
    """
    if torch.accelerator.current_accelerator() is None:
        torch.accelerator.empty_cache = torch.accelerator.empty_host_cache = _nothing


def _nothing() -> None:
    pass


@patch(
    uses(f"{REGISTRY}._LazyRegisteredModel.inspect_model_cls", "_run_in_subprocess"),
    ends="vLLM lets its platform decide",
    changes=(f"{REGISTRY}._run_in_subprocess",),
    loading=WITHOUT_KERNELS,
)
def inspect_models_in_this_process() -> None:
    """Let vLLM inspect a model's class in the current process.

    At the first start with a model, vLLM starts another process for this, so that the process that forks engines stays
    free of CUDA. That process imports all of vLLM first, which takes 5 to 20 seconds. The classes of models do not use
    a device when they are imported. If one did, vLLM (on an NPU, opset's platform) would spawn engines instead.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = _here


def _here(inspect: Callable[[], object]) -> object:
    return inspect()


@patch(
    has(f"{REGISTRY}._ModelRegistry.inspect_model_cls"),
    ends="vLLM asks its platform",
    changes=(f"{REGISTRY}._ModelRegistry.inspect_model_cls",),
    loading=WITHOUT_KERNELS,
)
def ask_before_models_are_imported(ask: Callable[[list[str]], None]) -> None:
    """Have vLLM call `ask` with the names of a model's architectures before it imports their modules to inspect them.

    The platform refuses multimodal models there, or those without torchvision, which many of their modules need. If the
    import itself raised, vLLM would log a traceback and say that the model could not be inspected.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    def around(inspect: Callable) -> Callable:
        def asked(self, architectures: str | list[str], *args, **kwargs):
            ask([architectures] if isinstance(architectures, str) else architectures)
            return inspect(self, architectures, *args, **kwargs)

        return asked

    wrap_once(type(ModelRegistry), "inspect_model_cls", around)


@patch(
    has("vllm.engine.arg_utils.EngineArgs.create_engine_config"),
    ends="vLLM asks its platform before it checks these arguments",
    changes=("vllm.engine.arg_utils.EngineArgs.create_engine_config",),
    loading=WITHOUT_KERNELS,
)
def ask_before_arguments_are_checked(ask: Callable[["EngineArgs"], None]) -> None:
    """Have vLLM call `ask` with the arguments of an engine before it makes a configuration of them.

    vLLM first checks the arguments of data parallelism itself, and whether Ray is installed. Its errors would tell
    users how to correct a setting that opset refuses.
    """
    from vllm.engine.arg_utils import EngineArgs

    def around(create: Callable) -> Callable:
        def asked(self: "EngineArgs", *args, **kwargs) -> "VllmConfig":
            ask(self)
            return create(self, *args, **kwargs)

        return asked

    wrap_once(EngineArgs, "create_engine_config", around)


@patch(
    has("vllm.sampling_params.SamplingParams.update_from_tokenizer"),
    ends="vLLM counts the tokens of bad words before an engine gets the request",
    changes=("vllm.sampling_params.SamplingParams.update_from_tokenizer",),
    loading=WITHOUT_KERNELS,
)
def ask_when_bad_words_are_tokens(ask: Callable[["SamplingParams"], None]) -> None:
    """Have vLLM call `ask` with a request's parameters when its bad words have become tokens.

    vLLM's second model runner has room for 1,024 of their tokens. If a request has more, the runner raises in the
    engine's process, and the engine ends. vLLM asks its platform about a request before it makes tokens of the words.
    """
    from vllm import SamplingParams

    def around(update: Callable) -> Callable:
        def asked(self: "SamplingParams", *args, **kwargs) -> None:
            update(self, *args, **kwargs)
            ask(self)

        return asked

    wrap_once(SamplingParams, "update_from_tokenizer", around)


@patch(
    has("vllm.config.VllmConfig._maybe_enable_breakable_cudagraph"),
    first=(0, 29),
    ends="vLLM reads its variable after `Platform.apply_config_platform_defaults`",
    changes=("vllm.config.vllm.VllmConfig._maybe_enable_breakable_cudagraph",),
    loading=("cuda",),
)
def ask_before_graphs_are_chosen(ask: Callable[["VllmConfig"], None]) -> None:
    """Have vLLM call `ask` before it reads whether graphs may be piecewise without a compiler.

    vLLM reads its variable for this before it asks the platform for its defaults. Earlier releases read it afterwards.
    """
    from vllm.config import VllmConfig

    def around(reads: Callable) -> Callable:
        def asked(config: "VllmConfig") -> bool:
            ask(config)
            return reads(config)

        return asked

    wrap_once(VllmConfig, "_maybe_enable_breakable_cudagraph", around)


@patch(
    uses("vllm.compilation.breakable_cudagraph.eager_break_during_capture", "is_breakable_cudagraph_enabled"),
    last=(0, 32),
    changes=("vllm.model_executor.layers.attention.attention.unified_attention_with_output",),
    worker=("cuda",),
)
def break_graphs_at_attention() -> None:
    """Let piecewise graphs break at attention, if attention is called directly.

    vLLM decides this by a variable when it imports its attention layer. A process that makes the configuration itself
    imports that layer before anybody could set the variable. This function must run before a model is loaded.
    """
    from vllm.compilation import breakable_cudagraph
    from vllm.model_executor.layers.attention import attention

    run = attention.unified_attention_with_output
    if run.__code__.co_filename != breakable_cudagraph.__file__:
        attention.unified_attention_with_output = breakable_cudagraph.eager_break_during_capture(run)


@patch(
    uses("vllm.utils.torch_utils.weak_ref_tensor", "weak_ref_tensor"),
    ends="vLLM has its own version in Python, or asks its platform for one",
    changes=("torch.ops._C.weak_ref_tensor",),
    loading=("cuda",),
    worker=("npu",),
    always=True,  # vLLM calls for it while it is being imported
)
def define_weak_ref_tensor(dispatch_key: str = "CUDA", weak: Callable | None = None) -> None:
    """Define `_C::weak_ref_tensor` if vLLM's kernels are absent: a tensor that does not keep its memory alive.

    vLLM's CUDA graph wrapper calls it for the outputs of a graph.

    Parameters: weak is the implementation for the dispatch key. By default, it is one in PyTorch.
    """
    if not hasattr(torch.ops._C, "weak_ref_tensor"):
        _library.define("weak_ref_tensor(Tensor input) -> Tensor")
        _library.impl("weak_ref_tensor", weak or _weak_ref_tensor, dispatch_key)


def _weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    weak = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    nothing = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return nothing.set_(weak, tensor.storage_offset(), tensor.size(), tensor.stride())


def _a_runner_names_cuda() -> bool:
    """Whether one of vLLM's model runners takes streams from torch.cuda. vLLM may remove the first one."""
    first = uses("vllm.v1.worker.gpu_model_runner.AsyncGPUModelRunnerOutput.__init__", "cuda")
    return first() or uses("vllm.v1.worker.gpu.model_runner.GPUModelRunner.__init__", "cuda")()


@patch(
    _a_runner_names_cuda,
    ends="vLLM uses torch.Stream, torch.Event and torch.accelerator throughout, and its runner takes the platform's "
    "graph wrapper, as only vLLM's compiler does today",
    changes=tuple(f"torch.cuda.{name}" for name in (*NAMES_OF_CUDA, "CUDAGraph", "graph")),
    worker=("npu",),
)
def name_npu_as_cuda(graph: type, capture: Callable) -> None:
    """Make the names of torch.cuda that vLLM's model runners use mean the NPU, in a process whose device is an NPU.

    The runners take streams, events and graphs from torch.cuda, also while an engine serves. These names raise if
    PyTorch was built without CUDA.

    Parameters: graph and capture replace torch.cuda.CUDAGraph and torch.cuda.graph.
    """
    import torch_npu

    for name in NAMES_OF_CUDA:
        setattr(torch.cuda, name, getattr(torch.npu, name))
    torch.cuda.CUDAGraph, torch.cuda.graph = graph, capture
    define_weak_ref_tensor("PrivateUse1", torch_npu._C._weak_ref_tensor)


@patch(
    has("vllm.v1.worker.gpu_worker.kernel_warmup"),
    ends="a worker class can override its kernel warm-up by a method",
    changes=("vllm.v1.worker.gpu_worker.kernel_warmup",),
    worker=("cuda", "npu"),
    always=True,  # without it, no kernel would be warmed up
)
@contextlib.contextmanager
def own_warm_up(warm_up: Callable) -> Iterator[None]:
    """Within this context, vLLM's worker calls `warm_up` instead of its own kernel warm-up before it captures graphs.

    vLLM's own function warms up vLLM's kernels. Its imports name compiled operators and raise if these are absent.
    """
    from vllm.v1.worker import gpu_worker

    original, gpu_worker.kernel_warmup = gpu_worker.kernel_warmup, warm_up
    try:
        yield
    finally:
        gpu_worker.kernel_warmup = original


@patch(
    has(f"{LAYERS}.rotary_embedding._ROPE_DICT"),
    ends="vLLM shares layers within a model alone",
    changes=(f"{LAYERS}.rotary_embedding._ROPE_DICT", *(f"{LAYERS}.activation.{name}._dict" for name in ACTIVATIONS)),
    worker=EVERY,
)
def forget_shared_layers() -> None:
    """Empty vLLM's caches of rotary embeddings and of activations before a model is loaded, so that it has new ones.

    vLLM shares them among all layers of all models of a process. Without this, another running engine's layers would
    get this engine's kernels. On vLLM's own wheel, a model would also get layers of the other kind, vLLM's or opset's.
    """
    for name in forget_shared_layers.bridge.changes:
        find(name).clear()


@patch(
    has("vllm.v1.attention.selector._cached_get_attn_backend.cache_clear"),
    ends="vLLM asks its platform for the attention of every engine",
    configuring=("native",),
)
def forget_chosen_attention() -> None:
    """Empty the cache `vllm.v1.attention.selector._cached_get_attn_backend` when an engine is configured.

    vLLM looks a layer up in it, whatever the engine, before it asks its platform. Without this, a second engine of a
    process would get the attention of the first, also where only one of them has opset's.
    """
    from vllm.v1.attention import selector

    selector._cached_get_attn_backend.cache_clear()
