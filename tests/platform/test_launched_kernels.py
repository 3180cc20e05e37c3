"""Opset implements every Triton kernel that vLLM's second model runner can launch on a CPU or an NPU."""

from fnmatch import fnmatch

import pytest
from launched_kernels import launched_kernels

from vllm_opset.platform import second_runner
from vllm_opset.platform.cpu import refusals as cpu_refusals
from vllm_opset.platform.cpu import runner_kernels as cpu
from vllm_opset.platform.npu import refusals as npu_refusals
from vllm_opset.platform.npu import runner_kernels as npu

pytestmark = pytest.mark.window

MAMBA = "Mamba, state-space and linear attention"
# By a pattern of kernels below `vllm.v1.worker`: the features without which the runner launches none of them. The rules
# of a device refuse these features.
OUT_OF_REACH = {
    "gpu.sample.batch_shard.*": ["batch-sharded sampling"],
    "gpu.sample.watermark.*": ["watermarks"],
    "gpu.cp_utils.*": ["decode context parallelism"],
    "gpu.model_states.prompt_embeds.*": ["prompt embeddings"],
    "gpu.model_states.mamba_hybrid.*": [MAMBA],
    "gpu.model_states.recoverssm.*": [MAMBA],
    "mamba_utils.*": [MAMBA],
    # vLLM clears new blocks of a cache for states, and of one in several dtypes.
    "utils._zero_kv_blocks_kernel": [MAMBA, "a KV cache in another dtype than the model's"],
}
VERIFYING = "other ways to verify drafts than vLLM's standard one"
DRAFTS = {
    "gpu.spec_decode.[dx]*": ["speculative decoding by another method"],  # DFlash, DSpark and XPress
    "gpu.spec_decode.multi_module_mtp.*": ["MTP by several modules"],
    "gpu.spec_decode.acceptance_estimator.*": [VERIFYING],
    "gpu.spec_decode.rejection_sampler_utils._compute_cumulative_log_p_kernel": [VERIFYING],
    "gpu.spec_decode.rejection_sampler_utils._compute_local_residual_mass_kernel": [VERIFYING],
}
if not second_runner.drafts_without_triton():
    DRAFTS = {"gpu.spec_decode.*": ["speculative decoding before vLLM 0.32"]}
OUT_OF_REACH_ON = {
    "cpu": OUT_OF_REACH | DRAFTS,
    "npu": OUT_OF_REACH
    | {
        "gpu.spec_decode.*": ["speculative decoding"],
        # Qwen3.5's models of text have such positions, and linear attention.
        "gpu.mm.rope.*": ["multimodal models", MAMBA],
    },
}
DEVICES = {"cpu": ([cpu.REGISTRY, cpu.DRAFTS], cpu_refusals.RULES), "npu": ([npu.REGISTRY], npu_refusals.RULES)}


def _out_of_reach(device: str) -> dict[str, list[str]]:
    return {f"vllm.v1.worker.{pattern}": features for pattern, features in OUT_OF_REACH_ON[device].items()}


def _not_implemented(device: str) -> set[str]:
    registries, _ = DEVICES[device]
    return launched_kernels().keys() - {one.kernel for registry in registries for one in registry.implementations}


@pytest.mark.skipif(
    not second_runner.replaces_triton_kernels(),
    reason="this vLLM has no hook for these kernels: runs with 0.31 and later",
)
@pytest.mark.parametrize("device", DEVICES)
def test_every_kernel_is_implemented_or_out_of_reach(device):
    kernels, patterns = _not_implemented(device), _out_of_reach(device)
    assert {kernel for kernel in kernels if not any(fnmatch(kernel, one) for one in patterns)} == set()
    assert {one for one in patterns if not any(fnmatch(kernel, one) for kernel in kernels)} == set(), "no such kernel"


@pytest.mark.parametrize("device", DEVICES)
def test_rules_refuse_what_would_launch_other_kernels(device):
    _, rules = DEVICES[device]
    features = {feature for of_pattern in _out_of_reach(device).values() for feature in of_pattern}
    assert features <= {rule.feature for rule in rules}


RUNNER = """
from vllm.v1.clear import Clear, kernel_of_others
from vllm.v1.worker.gpu.sample import _helper, _imported_kernel as imported

@triton.jit
def _load(x_ptr): ...

@triton.jit(do_not_specialize=["size"])
def _kernel(x_ptr, size):
    _load(_helper(x_ptr))

def run(x):
    _kernel[(1,)](x, 1)
    imported[(1,)](x)
    Clear().clear(x)
"""
SAMPLE = """
@triton.jit
def _helper(x_ptr): ...

@triton.heuristics({})
@triton.jit
def _imported_kernel(y_ptr): ...
"""
CLEAR = """
@triton.jit
def _clear_kernel(blocks_ptr): ...

@triton.jit
def kernel_of_others(z_ptr): ...

class Clear:
    def clear(self, x):
        _clear(x)

def _clear(x):
    _clear_kernel[(1,)](x)
"""


def test_kernels_are_found_where_they_are_launched_and_functions_of_kernels_are_none(tmp_path):
    """The runner imports a kernel of another module and does not use it."""
    sources = {"worker/gpu/runner.py": RUNNER, "worker/gpu/sample.py": SAMPLE, "clear.py": CLEAR}
    for name, source in sources.items():
        path = tmp_path / "vllm" / "v1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    assert launched_kernels(tmp_path) == {
        "vllm.v1.worker.gpu.runner._kernel": ("x_ptr", "size"),
        "vllm.v1.worker.gpu.sample._imported_kernel": ("y_ptr",),
        "vllm.v1.clear._clear_kernel": ("blocks_ptr",),
    }
