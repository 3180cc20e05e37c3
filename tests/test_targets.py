"""Targets: what a kernel may know of the device that it is chosen for."""

import pytest
import torch

from vllm_opset import ops, targets
from vllm_opset.kernel import kernels_of
from vllm_opset.ops.contract import Problem
from vllm_opset.targets import FP8, PDL, WGMMA, Target


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("nvidia/sm80", set()),
        ("nvidia/sm89", {FP8}),
        ("nvidia/sm90", {FP8, PDL, WGMMA}),
        ("nvidia/sm100", {FP8, PDL}),
        ("amd/gfx90a", set()),
        ("amd/gfx942", set()),
        ("amd/gfx950", {FP8}),
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
        kv_apart=False, target=Target(*name.split("/")),
    )  # fmt: skip
    reason = kernels_of("reshape_and_cache", elsewhere=True)["triton"].supports(problem)
    assert (reason == f"{name} does not convert fp8 e4m3") is refused


@pytest.mark.parametrize("op", ops.ALL, ids=str)
def test_every_ops_problem_carries_a_target(op):
    args, kwargs = next(op.samples("cpu", op.dtypes[0])).make()
    assert op.problem_for(*args, **kwargs).target == targets.of("cpu")
