"""All differences between the vLLM releases that are supported (0.26 to 0.33), and all patches of vLLM in place.

Each patch is one function here. Its docstring says why, for which releases, and when it can go. Differences are
detected from the modules and signatures of vLLM, never from its version. Most differences need no code of their own,
because a release does not call a method that it does not know:

- vLLM calls `OpsetAttentionBackend.get_kv_cache_shape` and `get_kv_cache_stride_order` up to 0.28. Later releases
  decide on the same shape themselves.
- `get_supported_kernel_block_sizes` takes an argument from 0.31 on.
- vLLM calls `OpsetCpuRunner._postprocess_triton` up to 0.30.
- `may_reinitialize_input_batch` lost an argument in 0.32.
- `layers.REPLACEMENTS` says which layer classes only newer releases have. `layers` finds the rotary embeddings by the
  forward method that they share.
- `refusals` and `native/parts` use `getattr` for fields of the configuration that some releases lack.
- `native/sampler` has a class for 0.26 to 0.29. There, the second model runner's sampler prepares the draw and draws in
  one method. The parameters of vLLM's methods decide which class fits.
- `npu/runner` zeroes and copies blocks itself, because vLLM's way of doing it differs between releases.
- vLLM calls `OpsetAttentionBackend.supported_kv_cache_layouts` from 0.29 on.
- vLLM calls a platform's `check_runner_kv_caches_multi_layer` from 0.28 on.
- `cpu/worker` wraps two methods that came with 0.32.
- `fusion` checks whether an attention layer computes the scales of its cache itself. None does from 0.30 on.
- `threads` protects OMP_NUM_THREADS from 0.26, which sets it to 1 for several workers and does not log it.
- `ir` registers opset's ops with vLLM's IR, which vLLM removes after 0.33.
"""

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def without_accelerator() -> None:
    """Let vLLM call PyTorch's accelerator clean-up on a machine without an accelerator.

    vLLM's `cleanup_dist_env_and_memory` calls `torch.accelerator.empty_cache` at shutdown. From 0.28 on it also calls
    `empty_host_cache`. vLLM skips both calls only on its own CPU platform. PyTorch raises if there is no accelerator.
    Releases 0.26 to 0.33 need this patch, in every process. vLLM's model runner for CPUs also replaces `empty_cache`,
    but with several workers the engine's process has no model runner. The patch can go when vLLM checks for an
    accelerator before this clean-up.
    """
    if torch.accelerator.current_accelerator() is None:
        torch.accelerator.empty_cache = torch.accelerator.empty_host_cache = _nothing


def _nothing() -> None:
    pass


def inspect_models_in_this_process() -> None:
    """Let vLLM inspect a model's class in the current process instead of in a process that first imports all of vLLM.

    vLLM starts that process at the first start with a model, so that the process that forks engines stays free of CUDA.
    The extra process takes 5 to 20 seconds. The classes of models do not use a device when they are imported. If one
    did, vLLM (on an NPU, opset's platform) would spawn engines instead. Releases 0.26 to 0.33 need this patch, before a
    model is configured. The patch can go when vLLM lets its platform decide.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = _here


def _here(inspect: Callable[[], object]) -> object:
    return inspect()


def ask_before_models_are_imported(ask: Callable[[list[str]], None]) -> None:
    """Have vLLM call `ask` with the names of a model's architectures before it imports their modules to inspect them.

    If the import itself raised, vLLM would log a traceback and say that the model could not be inspected. Releases 0.26
    to 0.33 need this patch, before a model is configured. The patch can go when vLLM asks its platform.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    registry = type(ModelRegistry)
    inspect = registry.inspect_model_cls
    if hasattr(inspect, "__wrapped__"):
        return

    @functools.wraps(inspect)
    def asked(self, architectures: str | list[str], *args, **kwargs):
        ask([architectures] if isinstance(architectures, str) else architectures)
        return inspect(self, architectures, *args, **kwargs)

    registry.inspect_model_cls = asked


def ask_before_graphs_are_chosen(ask: Callable[["VllmConfig"], None]) -> None:
    """Have vLLM call `ask` before it reads whether graphs may be captured in pieces without a compiler.

    In 0.29 to 0.33 vLLM reads its variable for this before it asks the platform for its defaults; earlier releases read
    it afterwards. The patch can go when vLLM reads its variable after `Platform.apply_config_platform_defaults`.
    """
    from vllm.config import VllmConfig

    reads = getattr(VllmConfig, "_maybe_enable_breakable_cudagraph", None)
    if reads is None or hasattr(reads, "__wrapped__"):
        return

    @functools.wraps(reads)
    def asked(config: "VllmConfig") -> bool:
        ask(config)
        return reads(config)

    VllmConfig._maybe_enable_breakable_cudagraph = asked


def break_graphs_at_attention() -> None:
    """Let graphs that are captured in pieces break at attention, if attention is called directly.

    In 0.26 to 0.32 vLLM decides this by a variable when it imports its attention layer. A process that makes the
    configuration itself imports that layer before anybody could set the variable. This function must run before a model
    is loaded. The patch can go when 0.33 is the oldest supported release.
    """
    from vllm.compilation import breakable_cudagraph
    from vllm.model_executor.layers.attention import attention

    run = attention.unified_attention_with_output
    if run.__code__.co_filename != breakable_cudagraph.__file__:
        attention.unified_attention_with_output = breakable_cudagraph.eager_break_during_capture(run)


def kv_cache_groups(config: "VllmConfig", spec: dict) -> list:
    """vLLM's groups of layers that share a block table. The function moved to another module in 0.33."""
    planning = "vllm.v1.core.kv_cache_planning"
    module = planning if importlib.util.find_spec(planning) else "vllm.v1.core.kv_cache_utils"
    return importlib.import_module(module).get_kv_cache_groups(config, spec)


def define_weak_ref_tensor(dispatch_key: str = "CUDA", weak: Callable | None = None) -> None:
    """Define `_C::weak_ref_tensor` if vLLM's kernels lack it: a tensor that does not keep its memory alive.

    vLLM's CUDA graph wrapper calls it for the outputs of a graph, in 0.26 to 0.33. The patch can go when vLLM has its
    own version in Python, or asks its platform for one. weak: the implementation for the dispatch key, if not this one
    in PyTorch.
    """
    if not hasattr(torch.ops._C, "weak_ref_tensor"):
        _library.define("weak_ref_tensor(Tensor input) -> Tensor")
        _library.impl("weak_ref_tensor", weak or _weak_ref_tensor, dispatch_key)


_library = torch.library.Library("_C", "FRAGMENT")


def _weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    weak = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    nothing = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return nothing.set_(weak, tensor.storage_offset(), tensor.size(), tensor.stride())


def name_npu_as_cuda(graph: type, capture: Callable) -> None:
    """Make the names of torch.cuda that vLLM's model runner uses mean the NPU, in a process whose device is an NPU.

    In 0.26 to 0.33 the runner takes streams, events and graphs from torch.cuda, also while it serves. They raise if
    PyTorch was built without CUDA. The patch can go when vLLM uses torch.Stream, torch.Event and torch.accelerator
    throughout, and its runner takes the platform's graph wrapper. Today only vLLM's compiler takes that wrapper. graph
    and capture replace torch.cuda.CUDAGraph and torch.cuda.graph.
    """
    import torch_npu

    for name in ("Event", "Stream", "stream", "current_stream", "default_stream", "set_stream", "synchronize"):
        setattr(torch.cuda, name, getattr(torch.npu, name))
    torch.cuda.CUDAGraph, torch.cuda.graph = graph, capture
    define_weak_ref_tensor("PrivateUse1", torch_npu._C._weak_ref_tensor)


@contextlib.contextmanager
def own_warm_up(warm_up: Callable) -> Iterator[None]:
    """Within this context, vLLM's worker calls `warm_up` instead of its own kernel warm-up before it captures graphs.

    vLLM's own function warms up vLLM's kernels. Its imports name compiled operators and raise if these are absent, in
    0.26 to 0.33. The patch can go when a worker class can override its kernel warm-up by a method.
    """
    from vllm.v1.worker import gpu_worker

    original, gpu_worker.kernel_warmup = gpu_worker.kernel_warmup, warm_up
    try:
        yield
    finally:
        gpu_worker.kernel_warmup = original
