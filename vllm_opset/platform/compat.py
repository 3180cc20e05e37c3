"""Every difference between the vLLM releases that are served (0.26 to 0.33), and all of vLLM that is changed in place.

Each change in place is one function here. It says why, for which releases, and when it can go. Differences are
found by looking at what vLLM offers, never by its version. Most need no code of their own, since a method that a
release does not know is never called:

- `OpsetAttentionBackend.get_kv_cache_shape` and `get_kv_cache_stride_order` are asked until 0.28; later vLLM itself
  decides on the same shape. `get_supported_kernel_block_sizes` takes an argument from 0.31 on.
- `OpsetCpuRunner._postprocess_triton` is called until 0.30; `may_reinitialize_input_batch` lost an argument in 0.32.
- `layers.REPLACEMENTS` says which classes came late. The family of rotary embeddings is found by what it shares.
- `refusals` and `native/parts` ask for parts of the configuration that came or went by `getattr`.
- `native/sampler` has a class for 0.26 to 0.29, whose second sampler prepares the draw and draws in one method. The
  parameters of vLLM's methods say which class fits.
- `npu/runner` zeroes and copies blocks itself, since how vLLM does it differs between releases.
- `OpsetAttentionBackend.supported_kv_cache_layouts` is asked from 0.29 on, a platform's
  `check_runner_kv_caches_multi_layer` from 0.28 on. `cpu/worker` wraps two methods that came with 0.32.
- `fusion` asks an attention whether it finds its cache's scales by itself, which none does from 0.30 on.
- `threads` keeps OMP_NUM_THREADS from 0.26, which sets it to 1 for several workers and does not say so.
- `ir` serves vLLM's IR, which goes after 0.33.
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
    """Lets PyTorch's accelerator clean-up be called on a machine without an accelerator.

    vLLM's `cleanup_dist_env_and_memory` calls `torch.accelerator.empty_cache` at shutdown, and from 0.28 on
    `empty_host_cache`, unless the platform is its own CPU platform. PyTorch raises where there is no accelerator.
    Needed by 0.26 to 0.33, in every process: vLLM's model runner for CPUs replaces `empty_cache` as well, but with
    several workers the engine's process has no model runner. Goes when vLLM asks for an accelerator before it cleans
    one up.
    """
    if torch.accelerator.current_accelerator() is None:
        torch.accelerator.empty_cache = torch.accelerator.empty_host_cache = _nothing


def _nothing() -> None:
    pass


def inspect_models_in_this_process() -> None:
    """Lets vLLM look at a model's class where it is asked to, and not in a process that imports all of vLLM for it.

    That process, of the first start with a model, is there to keep CUDA out of the one that forks engines. It takes 5
    to 20 seconds, and the classes of models do not use a device when they are imported; if one did, vLLM (on an NPU,
    opset's platform) would have engines spawned. Needed by 0.26 to 0.33, before a model is configured. Goes when vLLM
    asks its platform.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = _here


def _here(inspect: Callable[[], object]) -> object:
    return inspect()


def ask_before_models_are_imported(ask: Callable[[list[str]], None]) -> None:
    """Has vLLM call this with the names of a model's architectures before it imports their modules to look at them.

    vLLM logs what an import raises with its traceback, and says that the model could not be inspected. Needed by 0.26
    to 0.33, before a model is configured. Goes when vLLM asks its platform.
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
    """Has vLLM call this before it reads whether graphs may be captured in pieces without a compiler.

    A platform is asked for its defaults too late for it in 0.29 to 0.33, and in time before. Goes when vLLM reads its
    variable after `Platform.apply_config_platform_defaults`.
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
    """Lets graphs that are captured in pieces break at attention, where that is called directly.

    In 0.26 to 0.32 that is decided when vLLM's layer is imported, by a variable, and a process that makes the
    configuration itself imports it before anybody could set it. Needed before a model is loaded. Goes when 0.33 is the
    oldest release.
    """
    from vllm.compilation import breakable_cudagraph
    from vllm.model_executor.layers.attention import attention

    run = attention.unified_attention_with_output
    if run.__code__.co_filename != breakable_cudagraph.__file__:
        attention.unified_attention_with_output = breakable_cudagraph.eager_break_during_capture(run)


def kv_cache_groups(config: "VllmConfig", spec: dict) -> list:
    """vLLM's groups of layers that share a block table. The function has moved to another module in 0.33."""
    planning = "vllm.v1.core.kv_cache_planning"
    module = planning if importlib.util.find_spec(planning) else "vllm.v1.core.kv_cache_utils"
    return importlib.import_module(module).get_kv_cache_groups(config, spec)


def define_weak_ref_tensor(dispatch_key: str = "CUDA", weak: Callable | None = None) -> None:
    """Defines `_C::weak_ref_tensor`, a tensor over the same memory that does not keep it, if vLLM's kernels lack.

    vLLM's wrapper of CUDA graphs calls it for what a graph returns, in 0.26 to 0.33. Goes when vLLM has a version of
    its own in Python, or asks its platform for one. weak: what makes one for the key, if not PyTorch.
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
    """Makes what vLLM's model runner calls by torch.cuda mean the NPU, in a process that has one for its device.

    The runner names streams, events and graphs by torch.cuda, also while it serves, in 0.26 to 0.33; where PyTorch was
    built without CUDA these raise. Goes when vLLM uses torch.Stream, torch.Event and torch.accelerator throughout, and
    has its runner take the platform's wrapper of graphs, which only its compiler does. graph, capture: what to use for
    torch.cuda.CUDAGraph and torch.cuda.graph.
    """
    import torch_npu

    for name in ("Event", "Stream", "stream", "current_stream", "default_stream", "set_stream", "synchronize"):
        setattr(torch.cuda, name, getattr(torch.npu, name))
    torch.cuda.CUDAGraph, torch.cuda.graph = graph, capture
    define_weak_ref_tensor("PrivateUse1", torch_npu._C._weak_ref_tensor)


@contextlib.contextmanager
def own_warm_up(warm_up: Callable) -> Iterator[None]:
    """Within it, vLLM's worker calls this function where it warms up kernels before it captures graphs.

    What vLLM would call warms kernels of its own, and what it imports for that names compiled operators: it raises
    where they are absent, in 0.26 to 0.33. Goes when a worker can say by a method how it is warmed up.
    """
    from vllm.v1.worker import gpu_worker

    original, gpu_worker.kernel_warmup = gpu_worker.kernel_warmup, warm_up
    try:
        yield
    finally:
        gpu_worker.kernel_warmup = original
