import pytest
import torch
import torch.nn.functional as F

from vllm_opset import ops
from vllm_opset.kernel import kernels_of
from vllm_opset.kernels.cpu.linear import FEW
from vllm_opset.ops import samples

RNG = samples.generator("test_linear")


@pytest.mark.parametrize("with_bias", [True, False])
def test_agrees_with_torch(dtype, agree, with_bias):
    x, weight = (samples.normal((rows, 77), dtype, "cpu", RNG, std=77**-0.25) for rows in (5, 33))
    bias = samples.normal((33,), dtype, "cpu", RNG) if with_bias else None
    exact = F.linear(x.double(), weight.double(), bias.double() if with_bias else None)
    agree(ops.linear(x, weight, bias), exact.to(dtype))


@pytest.mark.parametrize("dtype", FEW, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_every_way_of_the_cpu_kernel_is_in_the_samples(dtype):
    """One token, few, and many: a sample with and one without a bias of each."""
    tokens = [
        args[0].shape[0] for sample in ops.linear.samples("cpu", dtype) if len((args := sample.make()[0])[0].shape) == 2
    ]
    ways = [("one" if n == 1 else "few" if n in FEW[dtype] else "many") for n in tokens]
    assert all(ways.count(way) >= 2 for way in ("one", "few", "many"))


@pytest.mark.parametrize("num_tokens", [1, 16, 80])
def test_a_bias_is_added_before_the_rounding(num_tokens):
    """In bf16 the product 257 has no place; with a bias of −1 the result has one."""
    x, weight = torch.ones(num_tokens, 257, dtype=torch.bfloat16), torch.ones(8, 257, dtype=torch.bfloat16)
    y = kernels_of("linear")["cpu"].run(x, weight, torch.full((8,), -2.0, dtype=torch.bfloat16))
    assert (y == 255).all()
