import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_opset import ops
from vllm_opset.kernel import kernels_of
from vllm_opset.ops import _samples

RNG = _samples.generator("test_rms_norm")


def native():
    """vLLM's own RMS norm, whichever provider is set."""
    from vllm import ir

    return ir.ops.rms_norm.impls["native"].impl_fn


@pytest.mark.parametrize("shape", [(1, 64), (7, 77), (3, 4, 128)])
def test_agrees_with_vllm(dtype, agree, shape):
    x, weight = _samples.normal(shape, dtype, "cpu", RNG), _samples.normal(shape[-1:], dtype, "cpu", RNG)
    agree(ops.rms_norm(x, weight, 1e-6), native()(x, weight, 1e-6))
    agree(ops.rms_norm(x, None, 1e-6), native()(x, None, 1e-6))


def test_agrees_with_vllms_gemma_norm(dtype, agree):
    """vLLM's norm adds 1 to the weight in fp32 and rounds only the result, so only the order of the sum differs."""
    x, weight = _samples.normal((5, 96), dtype, "cpu", RNG), _samples.normal((96,), dtype, "cpu", RNG)
    ours = ops.rms_norm(x, weight, 1e-6, weight_offset=1.0)
    theirs = native()(x, weight.float() + 1.0, 1e-6)
    agree(ours, theirs)
    assert dtype is torch.float32 or (ours == theirs).float().mean() > 0.99


def test_agrees_with_torch():
    x, weight = (torch.randn(shape, dtype=torch.float64, generator=RNG) for shape in ((4, 33), (33,)))
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), F.rms_norm(x, (33,), weight, 1e-5))


def test_is_rounded_once():
    """If values were rounded before the product, about a third of the elements would differ from the exact product."""
    x, weight = _samples.normal((64, 256), torch.bfloat16, "cpu", RNG), torch.full((256,), 1.1, dtype=torch.bfloat16)
    exact = F.rms_norm(x.double(), (256,), weight.double(), 1e-6).bfloat16()
    assert (ops.rms_norm(x, weight, 1e-6) == exact).float().mean() > 0.99


def test_epsilon_bounds_rows_of_zeros():
    assert torch.equal(ops.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


@pytest.mark.parametrize("weight", [torch.ones(1), torch.ones(3, 8), torch.ones(9)], ids=lambda w: str(list(w.shape)))
def test_refuses_a_weight_of_another_shape(weight):
    with pytest.raises(ValueError, match=r"weight and bias must be \[8\]"):
        ops.rms_norm(torch.ones(3, 8), weight, 1e-6)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@given(data=st.data())
@settings(deadline=None, max_examples=30, derandomize=True)
def test_strides_change_nothing(name, data):
    run = kernels_of("rms_norm")[name].run
    shape = [*data.draw(st.lists(st.integers(0, 4), max_size=3)), data.draw(st.integers(1, 40))]
    order = data.draw(st.permutations(range(len(shape))))
    wide = torch.randn([shape[i] + 1 for i in order], generator=_samples.generator("strides"))
    x = wide.permute([order.index(i) for i in range(len(shape))])[tuple(slice(size) for size in shape)]
    assert list(x.shape) == shape
    weight = torch.linspace(-1, 1, shape[-1])
    y = run(x, weight, 1e-6)
    assert y.is_contiguous()
    torch.testing.assert_close(y, run(x.contiguous(), weight, 1e-6), rtol=1e-6, atol=1e-6)
