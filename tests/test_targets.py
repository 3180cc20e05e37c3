"""Targets: what a kernel may know of the device that it is chosen for."""

import os
import subprocess
import sys

import pytest
import torch

from vllm_opset import ops, targets
from vllm_opset.kernel import kernels_of
from vllm_opset.ops.contract import Problem
from vllm_opset.ops.gemm.linear import LinearProblem
from vllm_opset.targets import AMX, FP8, INT8, ONEDNN, PDL, WGMMA, Target


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("nvidia/sm80", {INT8}),
        ("nvidia/sm89", {INT8, FP8}),
        ("nvidia/sm90", {INT8, FP8, PDL, WGMMA}),
        ("nvidia/sm100", {INT8, FP8, PDL}),
        ("amd/gfx90a", {INT8}),
        ("amd/gfx942", {INT8}),
        ("amd/gfx950", {INT8, FP8}),
        ("amd/gfx1100", {INT8}),
        ("amd/gfx1201", {INT8, FP8}),
        ("huawei/npu", set()),
        ("cpu/x86_64", set()),
    ],
)
def test_features_follow_from_vendor_and_architecture(name, features):
    target = Target(*name.split("/"))
    assert (target.features, str(target)) == (features, name)


def test_generations_rise_within_a_vendor():
    for vendor, names in {"nvidia": ("sm80", "sm90", "sm100", "sm120"), "amd": ("gfx908", "gfx90a", "gfx942")}.items():
        generations = [Target(vendor, name).generation for name in names]
        assert generations == sorted(set(generations))


def test_a_problem_carries_the_target_of_its_device_or_the_one_that_is_given():
    assert Problem("cpu", torch.float32).target == targets.of("cpu")
    with targets.instead(Target("amd", "gfx942")):
        assert str(Problem("cpu", torch.float32).target) == "amd/gfx942"
    given = Problem("cpu", torch.float32, target=Target("nvidia", "sm80"))
    assert given != Problem("cpu", torch.float32) and "target" not in str(given)


@pytest.mark.parametrize(("name", "refused"), [("nvidia/sm80", True), ("nvidia/sm89", False), ("amd/gfx942", True)])
def test_a_kernel_is_refused_by_its_problems_target_alone(name, refused):
    """The machine that is asked may be another one."""
    problem = ops.reshape_and_cache.problem(
        "cuda", torch.bfloat16, kv_cache_dtype=torch.float8_e4m3fn, num_kv_heads=8, head_size=64, block_size=16,
        split_kv_layout=False, target=Target(*name.split("/")),
    )  # fmt: skip
    reason = kernels_of("reshape_and_cache", elsewhere=True)["triton"].supports(problem)
    assert (reason == f"{name} does not convert fp8 e4m3") is refused


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Ascend910B3", "A2"),
        ("Ascend910_9362", "A3"),
        ("Ascend950PR_9589", "A5"),
        ("Ascend310P3", "310P"),
        ("Ascend910A", "Ascend910A"),
    ],
)
def test_socs_are_known_by_the_names_of_devices(name, expected):
    assert targets.soc(name) == expected


def test_a_processors_features_are_those_of_the_instructions_that_onednn_may_use():
    """AVX2 multiplies in fp32 alone, whatever this processor has. The limit is read when PyTorch is imported."""
    code = "from vllm_opset import targets; print(*sorted(targets.of('cpu').features))"
    paths = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": paths}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == [ONEDNN[torch.float32]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linear_on_a_processor_is_refused_by_the_problems_target_alone(dtype):
    supports = kernels_of("linear")["cpu"].supports

    def reason(*dtypes):
        target = Target("cpu", "x86_64", frozenset(ONEDNN[each] for each in dtypes))
        return supports(LinearProblem("cpu", dtype, 64, 64, target=target))

    assert reason() == "this PyTorch has no oneDNN"
    assert reason(*ONEDNN) is None
    assert dtype is torch.float32 or reason(torch.float32) == f"oneDNN does not multiply in {dtype} on this processor"


@pytest.mark.parametrize(
    ("architecture", "features", "rows", "packs"),
    [
        ("x86_64", (), 4096, True),
        ("x86_64", (ONEDNN[torch.bfloat16],), 4096, True),
        ("x86_64", (AMX,), 256, True),
        ("x86_64", (AMX,), 272, False),
        ("aarch64", (), 256, True),
        ("aarch64", (), 272, False),
    ],
)
def test_large_weights_in_bf16_go_to_matrix_instructions(architecture, features, rows, packs):
    """The limit of 512 KiB is 256 rows of 1,024 columns."""
    target = Target("cpu", architecture, frozenset(features))
    reason = kernels_of("linear")["cpp"].supports(LinearProblem("cpu", torch.bfloat16, 1024, rows, target=target))
    assert (reason is None) is packs


@pytest.mark.parametrize("op", ops.ALL, ids=str)
def test_every_ops_problem_carries_a_target(op):
    args, kwargs = next(op.samples("cpu", op.dtypes[0])).make()
    assert op.problem_for(*args, **kwargs).target == targets.of("cpu")
