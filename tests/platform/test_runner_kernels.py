"""Replacements of the second model runner's kernels write what vLLM's own write in Triton's interpreter, on a CPU."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import launches
import pytest
import torch
from processes import PATIENCE, environment

from vllm_opset.platform import second_runner
from vllm_opset.platform.bridges import find
from vllm_opset.platform.cpu import runner_kernels as cpu
from vllm_opset.platform.npu import runner_kernels as npu
from vllm_opset.platform.runner_kernels import Implementation, parameters

pytestmark = [
    pytest.mark.window,
    pytest.mark.skipif(
        not second_runner.replaces_triton_kernels(),
        reason="this vLLM has no hook for these kernels: runs with 0.31 and later",
    ),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton's interpreter runs vLLM's kernels"),
]


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict[str, list[dict[str, torch.Tensor]]]:
    """What vLLM's kernels write. A process of its own runs them, because Triton is off where it finds no GPU."""
    path = tmp_path_factory.mktemp("kernels") / "written.pt"
    # With this empty list of devices, vLLM uses Triton without a GPU.
    variables = environment(TRITON_INTERPRET=1, CUDA_VISIBLE_DEVICES="", OPSET_PLATFORM="cpu")
    program = subprocess.run(
        [sys.executable, Path(__file__).with_name("launches_by_vllm.py"), path],
        env=variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert program.returncode == 0, program.stderr[-4000:]
    return torch.load(path)


IMPLEMENTATIONS = {
    "cpu": cpu.REGISTRY.implementations + cpu.DRAFTS.implementations,
    "npu": npu.REGISTRY.implementations,
}
OF_DRAFTS = {one.kernel for one in cpu.DRAFTS.implementations}
OF_MULTIMODAL = {"vllm.v1.worker.gpu.mm.rope._prepare_rope_positions_kernel"}


@pytest.mark.parametrize(("device", "lacks"), [("cpu", set()), ("npu", OF_DRAFTS | OF_MULTIMODAL)])
def test_every_implementation_is_tested(device, lacks):
    assert {one.kernel for one in IMPLEMENTATIONS[device]} == launches.LAUNCHES.keys() - lacks


def _name(one: Implementation) -> str:
    return one.kernel + ", C++" * one.compiled


@pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(one, id=f"{device}: {_name(one)}")
        for device, implementations in IMPLEMENTATIONS.items()
        for one in implementations
    ],
)
def test_a_kernel_writes_what_vllms_writes(implementation, expected):
    from vllm.triton_utils.dispatcher import KernelOverride, _registry

    name = implementation.kernel
    if name in OF_DRAFTS and not second_runner.drafts_without_triton():
        pytest.skip("this vLLM has other kernels for drafts: runs with 0.32 and later")
    original = _registry[name][0] if name in _registry else find(name)  # an engine of this process may have replaced it
    names = parameters(original)
    kernel = KernelOverride(original, implementation.launcher(names))
    for launch, written in zip(launches.launches(name), expected[name], strict=True):
        ours = launch.run(kernel, names)
        assert ours.keys() == written.keys()
        for part, tensor in written.items():
            torch.testing.assert_close(ours[part], tensor, rtol=1e-5, atol=1e-5, equal_nan=True, msg=part)
