import pytest
import torch
import torch.nn.functional as F

from vllm_opset import ops
from vllm_opset.ops import _samples

RNG = _samples.generator("test_layer_norm")


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mean", [0.0, -30.0])
def test_agrees_with_torch(dtype, agree, weight, bias, mean):
    x = _samples.normal((5, 77), dtype, "cpu", RNG) + mean
    w, b = (_samples.normal((77,), dtype, "cpu", RNG) if given else None for given in (weight, bias))
    exact = F.layer_norm(x.double(), (77,), *(None if p is None else p.double() for p in (w, b)), 1e-5)
    agree(ops.layer_norm(x, w, b, 1e-5), exact.to(dtype), scale=max(1, abs(mean)))


def test_agrees_with_vllms_layer_with_fp32_parameters(agree, vllm_layers):
    from vllm.model_executor.layers.layernorm import LayerNorm

    layer = LayerNorm(64)
    layer.weight.data, layer.bias.data = torch.randn(64, generator=RNG), torch.randn(64, generator=RNG)
    x = _samples.normal((5, 64), torch.bfloat16, "cpu", RNG)
    agree(ops.layer_norm(x, layer.weight.data, layer.bias.data, 1e-6), layer(x).detach())


def test_rows_far_from_zero_keep_their_variance():
    """For these rows, mean(x²) − mean(x)² is nothing but rounding errors."""
    x = torch.randn(4, 256, generator=RNG) + 4096
    torch.testing.assert_close(ops.layer_norm(x, None, None, 0.0).var(dim=-1, correction=0), torch.ones(4))


@pytest.mark.parametrize("parameters", [(torch.ones(1), None), (None, torch.ones(3, 8))], ids=["weight", "bias"])
def test_refuses_parameters_of_another_shape(parameters):
    with pytest.raises(ValueError, match=r"weight and bias must be \[8\]"):
        ops.layer_norm(torch.ones(3, 8), *parameters, 1e-5)
