"""The gated and unary activations, against torch. tests/model/test_layers.py compares them with vLLM's layers."""

import pytest
import torch
import torch.nn.functional as F

from vllm_opset import ops
from vllm_opset.ops import _samples

RNG = _samples.generator("test_activations")


@pytest.mark.parametrize("name", ["gelu_new", "gelu_fast"])
def test_both_names_of_the_tanh_approximation_are_torchs(name):
    x = torch.linspace(-9, 9, 1001, dtype=torch.float64)
    torch.testing.assert_close(ops.BY_NAME[name](x), F.gelu(x, approximate="tanh"))


def test_gelu_and_mul_without_approximation_is_the_normal_distributions():
    gate, up = torch.linspace(-9, 9, 1001, dtype=torch.float64), torch.randn(1001, dtype=torch.float64, generator=RNG)
    exact = gate * torch.special.ndtr(gate) * up
    torch.testing.assert_close(ops.gelu_and_mul(torch.cat((gate, up))), exact)


def test_the_halves_of_mul_and_silu_are_those_of_silu_and_mul_swapped():
    x = torch.randn(4, 64, generator=RNG)
    assert torch.equal(ops.mul_and_silu(x), ops.silu_and_mul(x.roll(32, dims=-1)))


def test_swigluoai_interleaves_what_silu_and_mul_with_clamp_has_in_halves():
    x = torch.randn(4, 64, generator=RNG) * 5
    halves = x.unflatten(1, (32, 2)).mT.flatten(1)
    expected = ops.silu_and_mul_with_clamp(halves, limit=7.0, alpha=1.702, beta=1.0)
    assert torch.equal(ops.swigluoai_and_mul(x), expected)


def test_a_clamp_out_of_reach_changes_nothing():
    x = torch.randn(4, 64, generator=RNG)
    torch.testing.assert_close(ops.silu_and_mul_with_clamp(x, limit=100.0), ops.silu_and_mul(x))


def test_clamps_the_gate_from_above_only():
    x = torch.tensor([[-20.0, 20.0, 1.0, 1.0]])  # two gates and two ups
    gate = torch.tensor([[-20.0, 3.0]])
    torch.testing.assert_close(ops.silu_and_mul_with_clamp(x, limit=3.0), F.silu(gate))


def test_names_an_odd_width():
    """Samples of each contract check that every gated activation refuses it."""
    with pytest.raises(ValueError, match="must be even, not 77"):
        ops.silu_and_mul(torch.ones(2, 77))


def test_refuses_an_unknown_approximation():
    with pytest.raises(ValueError, match="one of none, tanh, not 'erf'"):
        ops.gelu_and_mul(torch.ones(2, 4), approximate="erf")


def test_what_overflows_is_infinite():
    assert torch.equal(
        ops.relu2(torch.tensor([300.0, -300.0], dtype=torch.float16)), torch.tensor([torch.inf, 0]).half()
    )
