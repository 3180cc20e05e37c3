"""What opset needs for vLLM's first model runner alone: a patch, and differences between releases that need none."""

from vllm_opset.platform.bridges import Bridge, has, takes, uses
from vllm_opset.platform.v1 import input_batch

RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"

PATCHED = (input_batch,)
DIFFERENCES = (
    Bridge(
        "C++ operators of the CPU runner",
        "vLLM's model runner for CPUs replaces Triton kernels by C++ operators, which are absent here.",
        "vllm_opset.platform.v1.cpu_runner.OpsetCpuRunner._postprocess_triton",
        has("vllm.v1.worker.cpu_model_runner.CPUModelRunner._postprocess_triton"),
        last=(0, 30),
    ),
    Bridge(
        "block sizes of the input batch",
        "vLLM passes `kernel_block_sizes` when it makes the input batch anew.",
        "vllm_opset.platform.v1.cpu_runner.OpsetCpuRunner.may_reinitialize_input_batch",
        takes(f"{RUNNER}.may_reinitialize_input_batch", "kernel_block_sizes"),
        last=(0, 31),
    ),
    Bridge(
        "draws that are taken back",
        "vLLM's model runner takes the draw of a request back by the offset of its generator. Generators for CPUs have "
        "none and raise.",
        "vllm_opset.platform.v1.sampler.SeededGenerator",
        uses(f"{RUNNER}._bookkeeping_sync", "set_offset"),
        ends="PyTorch's generators for CPUs have an offset, or vLLM takes no draw back",
    ),
    Bridge(
        "blocks that are zeroed",
        "vLLM zeroes blocks of the cache by Triton. Up to 0.28 it copies a block as if it were one piece of memory.",
        "vllm_opset.platform.v1.npu_runner.OpsetNpuRunner._update_states",
        has(f"{RUNNER}._zero_block_ids"),
        ends="vLLM asks its platform to do it",
    ),
)
