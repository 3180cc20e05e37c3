import pytest
import torch

from vllm_opset import ops
from vllm_opset.ops import _samples

RNG = _samples.generator("test_fused_add_rms_norm")


def normals(shape, dtype):
    return (_samples.normal(size, dtype, "cpu", RNG) for size in (shape, shape, shape[-1:]))


@pytest.mark.parametrize("shape", [(1, 64), (7, 77), (3, 4, 128)])
@pytest.mark.parametrize("gemma", [False, True], ids=["plain", "gemma"])
def test_agrees_with_vllm(dtype, agree, shape, gemma):
    from vllm import ir

    x, residual, weight = normals(shape, dtype)
    native = ir.ops.fused_add_rms_norm.impls["native"].impl_fn
    theirs = native(x, residual, weight.float() + 1.0 if gemma else weight, 1e-6)
    ops.fused_add_rms_norm(x, residual, weight, 1e-6, weight_offset=float(gemma))
    agree(x, theirs[0])
    assert torch.equal(residual, theirs[1])
    if gemma and dtype is not torch.float32:
        assert (x == theirs[0]).float().mean() > 0.99, "nothing but the order of the sum should differ"


def test_is_the_norm_of_the_sum(dtype, agree):
    x, residual, weight = normals((6, 64), dtype)
    total = x.double() + residual.double()
    ops.fused_add_rms_norm(x, residual, weight, 1e-6)
    agree(x, ops.rms_norm(total, weight.double(), 1e-6).to(dtype))
    assert torch.equal(residual, total.to(dtype))


def test_a_chain_of_layers_is_a_running_sum():
    residual = torch.zeros(3, 32, dtype=torch.float64)
    parts = [torch.randn(3, 32, dtype=torch.float64, generator=RNG) for _ in range(4)]
    for part in parts:
        x = part.clone()
        ops.fused_add_rms_norm(x, residual, None, 1e-6)
    torch.testing.assert_close(residual, sum(parts))
    torch.testing.assert_close(x, ops.rms_norm(residual, None, 1e-6))


@pytest.mark.parametrize("shape", [(1, 8), (3, 1), (8,)], ids=str)
def test_refuses_a_residual_of_another_shape(shape):
    with pytest.raises(ValueError, match="x and residual must have one shape"):
        ops.fused_add_rms_norm(torch.ones(3, 8), torch.ones(shape), None, 1e-6)


def test_a_refused_call_leaves_its_arguments_alone():
    x, residual = torch.ones(3, 8), torch.ones(3, 8)
    with pytest.raises(ValueError, match="weight"):
        ops.fused_add_rms_norm(x, residual, torch.ones(1), 1e-6)
    assert torch.equal(x, torch.ones(3, 8)) and torch.equal(residual, torch.ones(3, 8))
