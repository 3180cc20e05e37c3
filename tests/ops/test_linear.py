import pytest
import torch
import torch.nn.functional as F

from vllm_opset import ops
from vllm_opset.kernel import Kernel, kernels_of
from vllm_opset.kernels.cpu.linear import CACHED_BYTES
from vllm_opset.ops import _samples
from vllm_opset.ops.gemm.linear import LinearProblem

RNG = _samples.generator("test_linear")


@pytest.mark.parametrize("with_bias", [True, False])
def test_agrees_with_torch(dtype, agree, with_bias):
    x, weight = (_samples.normal((rows, 77), dtype, "cpu", RNG, std=77**-0.25) for rows in (5, 33))
    bias = _samples.normal((33,), dtype, "cpu", RNG) if with_bias else None
    exact = F.linear(x.double(), weight.double(), bias.double() if with_bias else None)
    agree(ops.linear(x, weight, bias), exact.to(dtype))


def test_every_way_of_the_cpu_kernel_is_in_the_samples():
    """Covers fp32 with and without a bias, each with a packed weight and with a small one."""
    calls = [sample.make()[0] for sample in ops.linear.samples("cpu", torch.float32) if "fp8" not in sample.name]
    assert len({(weight.nbytes > CACHED_BYTES, bias is None) for _, weight, bias in calls}) == 4


def kernel_for(dtype: torch.dtype) -> Kernel:
    """The CPU kernel, on a processor where oneDNN multiplies in that dtype. For fp32 that is any processor."""
    kernel = kernels_of("linear")["cpu"]
    if reason := kernel.supports(LinearProblem("cpu", dtype, 64, 64)):
        pytest.skip(f"{reason}: runs on a processor with AVX-512 or AMX instructions for this dtype")
    return kernel


@pytest.mark.parametrize("num_tokens", [1, 16, 80])
def test_a_bias_is_added_before_the_rounding(num_tokens):
    """bf16 cannot represent the product 257; with a bias of −2 it can represent the result."""
    x, weight = torch.ones(num_tokens, 257, dtype=torch.bfloat16), torch.ones(8, 257, dtype=torch.bfloat16)
    y = kernel_for(torch.bfloat16).call(x, weight, torch.full((8,), -2.0, dtype=torch.bfloat16))
    assert (y == 255).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_is_packed_where_onednn_multiplies(dtype):
    kernel = kernel_for(dtype)
    large, small = (torch.ones(rows, 1024, dtype=dtype) for rows in (1024, 8))
    assert kernel.prepared("weight", large).is_mkldnn
    assert kernel.prepared("weight", small).is_mkldnn is (dtype is not torch.float32)
