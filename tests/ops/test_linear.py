import pytest
import torch
import torch.nn.functional as F

from vllm_opset import ops
from vllm_opset.kernel import Kernel, kernels_of
from vllm_opset.kernels.cpu.linear import CACHED_BYTES
from vllm_opset.ops import _samples
from vllm_opset.ops.contract import Sample
from vllm_opset.ops.gemm._quantised import BLOCK, ROUNDED_FACTORS, TOKEN_BLOCK, quantised_normal
from vllm_opset.ops.gemm.linear import FP8_SUM_BITS, LinearProblem
from vllm_opset.ops.schemes import FP8, INT8, PER_ROW, PER_TENSOR, Quantised, Scheme
from vllm_opset.parity import check_sample
from vllm_opset.targets import Target, instead

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


HOPPER, BY_ROWS = Target("nvidia", "sm90"), Quantised(FP8, PER_ROW)


def on_hopper(columns=4096, dtype=torch.bfloat16, weight=BY_ROWS, activation=BY_ROWS, target=HOPPER) -> LinearProblem:
    return LinearProblem("cuda", dtype, columns, 64, Scheme(weight, activation), target=target)


def hopper_sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x weightᵀ as Hopper's tensor cores add products of fp8, 32 columns at a time.

    The products and the sum before them are cut to FP8_SUM_BITS bits of the largest of them. So is their sum.
    """

    def cut(values: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        unit = 2.0 ** (largest.frexp().exponent - FP8_SUM_BITS)
        return (values / unit).trunc() * unit

    total = torch.zeros(len(x), len(weight), 1)
    for some, others in zip(x.float().split(32, 1), weight.float().split(32, 1), strict=True):
        terms = torch.cat((total, some[:, None] * others), 2)
        total = cut(terms, terms.abs().amax(2, keepdim=True)).sum(2, keepdim=True)
        total = cut(total, total)
    return total[..., 0]


@pytest.mark.parametrize("columns", [1024, 16384])
def test_sums_of_fp8_on_hopper_err_as_the_contract_says(columns):
    x, weight = (quantised_normal((rows, columns), PER_ROW, "cpu", RNG)[0] for rows in (48, 64))
    exact = x.double() @ weight.double().T
    error = (hopper_sums(x, weight) - exact).std() / exact.std()
    assert 0.2 < error / ops.linear.error_of(on_hopper(columns)) < 0.5


@pytest.mark.parametrize(
    "other",
    [
        {"weight": Quantised(FP8, BLOCK), "activation": Quantised(FP8, TOKEN_BLOCK)},
        {"activation": None},
        {"weight": Quantised(INT8, PER_ROW), "activation": Quantised(INT8, PER_ROW)},
        {"weight": None, "activation": None},
        {"dtype": torch.float32},
        {"target": Target("nvidia", "sm80")},
        {"target": Target("nvidia", "sm100")},
        {"target": Target("cpu", "x86_64")},
        {"target": Target("huawei", "A2")},
    ],
    ids=str,
)
def test_no_other_problem_has_a_wider_tolerance(other):
    assert ops.linear.error_of(on_hopper()) == 2.0**-8
    assert ops.linear.error_of(on_hopper(weight=Quantised(FP8, PER_TENSOR))) == 2.0**-8
    assert ops.linear.error_of(on_hopper(dtype=torch.float16)) == 2.0**-7
    assert ops.linear.error_of(on_hopper(**other)) == 0


def test_a_check_allows_what_the_hardware_loses():
    """The result is 0. On Hopper, the check allows the error of the hardware beside what the sample's scale allows."""

    def make() -> tuple[tuple, dict]:
        ones = torch.ones(1, 1)
        return (torch.zeros(2, 4096).to(FP8), torch.zeros(8, 4096).to(FP8), None, ones, ones, torch.bfloat16), {}

    def error(wrong: float, target: Target) -> float:
        kernel = Kernel("linear", "off", "tests", (), lambda _: None, lambda *_: torch.full((2, 8), wrong).bfloat16())
        with instead(target):
            return check_sample(ops.linear, kernel, Sample("zeros", make, ROUNDED_FACTORS), torch.bfloat16).error

    allowed, more = ROUNDED_FACTORS * 2.0**-8, 2.0**-8
    assert error(allowed + more, HOPPER) == pytest.approx(1)
    assert error(allowed + more, Target("nvidia", "sm80")) == pytest.approx(1 + more / allowed)
