"""The patches that let vLLM's second model runner serve."""

from collections.abc import Callable
from dataclasses import replace

import torch

from vllm_opset.platform.bridges import has, patch
from vllm_opset.platform.compat import NAMES_OF_CUDA
from vllm_opset.platform.refusals import Rule

BUFFERS = "vllm.v1.worker.gpu.buffer_utils"
PINNED_VIEW = f"{BUFFERS}.get_accelerator_view_from_cpu_tensor"
TABLES = "vllm.v1.worker.gpu.block_table.BlockTables"
DRAFT_MODEL = "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator.StandaloneARSpeculator"
OVERRIDES = "vllm.platforms.interface.Platform.register_triton_kernel_overrides"
NGRAMS = "vllm.v1.worker.gpu.spec_decode.ngram.speculator"
# Whether vLLM asks its platform for implementations of the Triton kernels that it launches (0.31 and later).
replaces_triton_kernels = has(OVERRIDES)
# Whether its kernels for drafts are those that opset replaces (0.32 and later).
drafts_without_triton = has(NGRAMS)


UNAVAILABLE = Rule(
    "vLLM's second model runner before vLLM 0.31",
    "unset VLLM_USE_V2_MODEL_RUNNER",
    lambda config: config.use_v2_model_runner and not replaces_triton_kernels(),
)


def why_none() -> str | None:
    """Why the second runner cannot serve on a device without Triton; None if it can."""
    if replaces_triton_kernels():
        return None
    return "this release of vLLM cannot replace the Triton kernels of the second one"


@patch(
    has(OVERRIDES),
    first=(0, 31),
    ends="vLLM chooses its second model runner without Triton if its kernels are replaced",
    changes=("vllm.config.vllm.HAS_TRITON",),
    loading=("cpu", "npu"),
)
def configure_without_triton() -> None:
    """Let vLLM choose its second model runner without Triton, because opset replaces the kernels that it launches.

    If Triton finds no GPU, vLLM takes the first runner. Up to 0.32, it raises if a user asks for the second one.
    """
    from vllm.config import vllm

    vllm.HAS_TRITON = True


@patch(
    has(OVERRIDES),
    first=(0, 31),
    ends="vLLM's second model runner needs no Triton if its kernels are replaced",
    changes=("vllm.triton_utils.triton.next_power_of_2", "vllm.v1.worker.gpu_worker.HAS_TRITON"),
    worker=("cpu", "npu"),
)
def launch_without_triton() -> None:
    """Let vLLM's second model runner start without Triton, because opset replaces the kernels that it launches.

    From 0.33 on, vLLM's worker raises for this runner if Triton finds no GPU. vLLM's placeholder for Triton lacks a
    function that computes the sizes of launches.
    """
    from vllm.triton_utils import HAS_TRITON, triton
    from vllm.utils.math_utils import next_power_of_2
    from vllm.v1.worker import gpu_worker

    if not HAS_TRITON:
        triton.next_power_of_2 = next_power_of_2
        gpu_worker.HAS_TRITON = True


@patch(
    drafts_without_triton,
    first=(0, 32),
    ends="vLLM drafts by n-grams without Triton if its kernels are replaced",
    changes=(f"{NGRAMS}.HAS_TRITON",),
    worker=("cpu",),
)
def draft_without_triton() -> None:
    """Let vLLM's second model runner draft by n-grams without Triton, because opset replaces the kernels for that.

    vLLM raises where Triton finds no GPU.
    """
    from vllm.v1.worker.gpu.spec_decode.ngram import speculator

    speculator.HAS_TRITON = True


@patch(
    drafts_without_triton,
    first=(0, 32),
    ends="vLLM's second model runner names no stream for a tensor on a CPU",
    changes=("torch.Tensor.record_stream",),
    worker=("cpu",),
)
def record_no_stream() -> None:
    """Let vLLM's second model runner say that a stream reads drafts. Nothing runs beside a CPU.

    It says so where a request has a structured output. PyTorch raises for tensors on a CPU.
    """
    torch.Tensor.record_stream = lambda tensor, stream: None


@patch(
    has(OVERRIDES),
    first=(0, 31),
    ends="vLLM's second model runner uses torch.Stream, torch.Event and torch.accelerator throughout",
    changes=(*(f"torch.cuda.{name}" for name in NAMES_OF_CUDA), "torch.accelerator.synchronize"),
    worker=("cpu",),
)
def name_cpu_as_cuda() -> None:
    """Make the names of torch.cuda that vLLM's second model runner uses mean the CPU, where nothing runs beside it.

    PyTorch has such streams and events for a CPU, which do nothing. Those of torch.cuda raise without CUDA.
    """
    torch.cuda.Event, torch.cuda.Stream = _EventOfCpu, torch.cpu.Stream
    torch.cuda.stream, torch.cuda.current_stream = _another(torch.cpu.stream), _another(torch.cpu.current_stream)
    torch.cuda.default_stream = _another(torch.cpu.current_stream)
    torch.cuda.synchronize, torch.accelerator.synchronize = (_another(torch.cpu.synchronize) for _ in range(2))
    torch.cuda.set_stream = _ignored


class _EventOfCpu(torch.cpu.Event):
    def __init__(self, **of_cuda: bool) -> None:
        pass


def _another(function: Callable) -> Callable:
    """Another function that does the same. torch.compile knows functions by identity, and takes none by two names."""
    return lambda *args, **kwargs: function(*args, **kwargs)


def _ignored(stream: torch.cpu.Stream) -> None:
    pass


@patch(
    has(PINNED_VIEW),
    ends="vLLM views pinned memory on out-of-tree platforms too",
    changes=(PINNED_VIEW,),
    worker=("cuda",),
)
def view_pinned_memory(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let vLLM's second model runner view pinned memory from a GPU, on a platform out of vLLM's tree.

    Its buffers are such views. vLLM's own function for this raises there. Elsewhere it calls a compiled operator.

    Parameters: view returns the device's view of a tensor in pinned memory.
    """
    from vllm.v1.worker.gpu import buffer_utils

    buffer_utils.get_accelerator_view_from_cpu_tensor = view


@patch(
    has(OVERRIDES),
    first=(0, 31),
    ends="vLLM asks the platform whether its device can view pinned memory",
    changes=(f"{BUFFERS}.is_uva_available", f"{TABLES}._make_ptr_tensor"),
    worker=("npu",),
)
def copy_to_device() -> None:
    """Let vLLM's second model runner copy its buffers to a device that cannot view the host's memory.

    vLLM has such buffers for platforms without pinned memory. Its kernels also read tensors by their addresses. Their
    replacements find the tensors in the attribute `opset_tensors` of what takes the place of the addresses.
    """
    from vllm.v1.worker.gpu import block_table, buffer_utils

    buffer_utils.is_uva_available = lambda: False
    block_table.BlockTables._make_ptr_tensor = _kept


def _kept(tables, tensors) -> torch.Tensor:
    kept = torch.empty(0)
    kept.opset_tensors = list(tensors)
    return kept


@patch(
    has(OVERRIDES),
    first=(0, 31),
    ends="vLLM has a graph mode that captures mixed steps whole, beside graphs of decode steps",
    worker=("cuda", "native"),
)
def capture_full_for_piecewise(manager) -> None:
    """Let vLLM's second model runner capture full graphs of prompts and mixed steps, beside those of decode steps.

    The runner's `cudagraph_manager` lists the graphs to capture and to replay. In its lists, full graphs replace the
    piecewise ones. From 0.31 on, vLLM prepares such a graph for one request that has all of its tokens.

    Parameters: manager is a `ModelCudaGraphManager` that has not captured yet.
    """
    from vllm.config import CUDAGraphMode

    whole = {
        pieces: replace(pieces, cg_mode=CUDAGraphMode.FULL, num_reqs=min(pieces.num_tokens, manager.max_num_reqs))
        for pieces in manager._capture_descs.pop(CUDAGraphMode.PIECEWISE)
    }
    captured = [*whole.values(), *manager._capture_descs.get(CUDAGraphMode.FULL, [])]
    manager._capture_descs[CUDAGraphMode.FULL] = sorted(captured, key=lambda graph: -graph.num_tokens)
    for graphs in manager._candidates.values():  # in the order in which the manager tries them: decode comes first
        graphs[:] = [whole.get(graph, graph) for graph in graphs]


@patch(
    has(OVERRIDES),
    first=(0, 31),
    ends="vLLM's second model runner captures the LM head of decode steps",
    worker=("cuda", "native"),
)
def sample_by(runner, sample: Callable[..., tuple]) -> None:
    """Let a captured graph multiply by the LM head in a decode step of vLLM's second model runner.

    The runner's method `sample` gathers hidden states, multiplies and draws. It has no hook before the draw.

    Parameters: runner is a `GPUModelRunner`. sample replaces its method, and calls it in all other steps.
    """
    runner.sample = sample


@patch(
    has(DRAFT_MODEL),
    first=(0, 32),
    ends="vLLM captures draft models in CUDA graphs",
    worker=("cuda", "native"),
)
def draft_by(speculator, run_model: Callable[..., torch.Tensor]) -> None:
    """Let captured graphs run a draft model in vLLM's second model runner.

    Its method `_run_model` launches each kernel from Python. It has no hook.

    Parameters: speculator is a `StandaloneARSpeculator`. run_model replaces its method, and calls it in other steps.
    """
    speculator._run_model = run_model


@patch(
    has(OVERRIDES),
    first=(0, 31),
    ends="vLLM's second model runner asks a backend whether a step that a graph replays needs metadata",
    worker=("cuda", "native"),
)
def skip_metadata(model_state) -> None:
    """Let vLLM's second model runner build no attention metadata for a step that a full graph replays.

    The graph reads the buffers that were given to it when it was captured. vLLM builds metadata in each step, because
    some backends plan the step meanwhile. Its `model_state` does so.

    Parameters: model_state is a `DefaultModelState`.
    """
    from vllm.config import CUDAGraphMode

    prepare = model_state.prepare_attn

    def prepare_attn(input_batch, cudagraph_mode: CUDAGraphMode, *args, for_capture: bool = False, **kwargs) -> dict:
        if cudagraph_mode == CUDAGraphMode.FULL and not for_capture:
            return {}
        return prepare(input_batch, cudagraph_mode, *args, for_capture=for_capture, **kwargs)

    model_state.prepare_attn = prepare_attn
