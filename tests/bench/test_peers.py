"""Peers with arguments of their own: what reaches the functions of vLLM, which tests replace, stands for the call."""

import dataclasses
import importlib
import inspect
import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.cache_size import CacheSizeRelevantForFrame, exceeds_recompile_limit
from torch._guards import CompileId

from vllm_opset import ops
from vllm_opset.bench import peers
from vllm_opset.bench.measure import candidates
from vllm_opset.bench.peers import _vllm_int4, deep_gemm, vllm_compiled
from vllm_opset.ops.contract import Op, Sample
from vllm_opset.ops.schemes import dequantise
from vllm_opset.parity import check_sample

pytestmark = pytest.mark.window
DTYPE = torch.bfloat16
FUSED_MOE = "vllm.model_executor.layers.fused_moe"


def drawn(op: Op, *words: str) -> Sample:
    """The first random problem whose name has all these words."""
    samples = (op.draw("cpu", DTYPE, random.Random(f"peers {i}")) for i in range(500))
    return next(sample for sample in samples if all(word in sample.name for word in words))


def checked(name: str, op: Op, sample: Sample):
    (candidate,) = (one for one in candidates(op, "cpu", None, [name]) if one.peer)
    return check_sample(op, candidate.kernel, sample, DTYPE)


class InPlainTorch:
    """A mixed-precision kernel of vLLM, as its class is used, which multiplies by what its parameters stand for."""

    def __init__(self, config, w_q_param_name, w_s_param_name, w_zp_param_name=None):
        self.config, self.names = config, (w_q_param_name, w_s_param_name, w_zp_param_name)

    def process_weights_after_loading(self, layer):
        utils = importlib.import_module("vllm.model_executor.layers.quantization.utils.quant_utils")
        permute = importlib.import_module("vllm.model_executor.parameter").permute_param_layout_
        unpack, type_ = utils.unpack_quantized_values_into_int32, self.config.weight_type
        weight, scale, zeros = (getattr(layer, name, None) for name in self.names)
        # In the words of Machete's comment on its inputs.
        values = unpack(permute(weight, input_dim=0, output_dim=1, packed_dim=0).data, type_, packed_dim=0)
        scale = permute(scale, input_dim=0, output_dim=1).data
        middle = type_.bias
        if self.config.zero_points:
            zeros = permute(zeros, input_dim=0, output_dim=1, packed_dim=1)
            middle = unpack(zeros.data, type_, packed_dim=1).repeat_interleave(self.config.group_size, 0)
        self.weight = ((values - middle) * scale.float().repeat_interleave(len(values) // len(scale), 0)).to(DTYPE)
        assert tuple(self.weight.shape) == self.config.partition_weight_shape

    def apply_weights(self, layer, x, bias=None):
        return F.linear(x, self.weight.T, bias)


@pytest.mark.parametrize("zero_points", ["zero points", "groups of 128)"])
def test_int4_weights_reach_the_kernel_that_vllm_chooses(monkeypatch, zero_points):
    chosen = []
    monkeypatch.setattr(f"{_vllm_int4.LINEAR}.choose_mp_linear_kernel", lambda c: chosen.append(c) or InPlainTorch)
    check = checked("vllm_compiled", ops.linear, drawn(ops.linear, "int4", zero_points))
    assert check.outcome == "passed", check.failure
    assert chosen[0].zero_points == (zero_points == "zero points") and chosen[0].act_type == DTYPE


def scaled_mm(out, a, b, scale_a, scale_b, bias=None):
    """CUTLASS' product of vLLM, with the layouts that it requires."""
    assert b.stride(0) == 1 and (scale_a.shape[1] == 1 or scale_a.stride(0) == 1 or len(a) == 1)
    assert scale_b.shape == (b.shape[1], 1) or scale_b.shape == (-(-b.shape[0] // 128), -(-b.shape[1] // 128))
    weight_scale = scale_b if scale_b.shape[1] == 1 and scale_b.shape[0] == b.shape[1] else scale_b.T
    wide = [
        dequantise(values, scale.contiguous(), torch.float32) for values, scale in ((a, scale_a), (b.T, weight_scale))
    ]
    out.copy_(F.linear(*wide))


@pytest.mark.parametrize("kind", ["fp8-blocks", "fp8-channels"])
def test_fp8_weights_reach_cutlass(monkeypatch, kind):
    monkeypatch.setattr(torch.ops._C, "cutlass_scaled_mm", scaled_mm, raising=False)
    check = checked("vllm_compiled", ops.linear, drawn(ops.linear, kind))
    assert check.outcome == "passed", check.failure


def test_fp8_weights_by_blocks_reach_deep_gemm(monkeypatch):
    def fp8_gemm_nt(x, weight, out, is_deep_gemm_e8m0_used):
        assert not is_deep_gemm_e8m0_used
        out.copy_(F.linear(*(dequantise(*part, torch.float32) for part in (x, weight))))

    functions = SimpleNamespace(fp8_gemm_nt=fp8_gemm_nt, get_col_major_tma_aligned_tensor=lambda scale: scale)
    monkeypatch.setattr(deep_gemm, "_module", lambda: functions)
    check = checked("deep_gemm", ops.linear, drawn(ops.linear, "fp8-blocks"))
    assert check.outcome == "passed", check.failure
    for other in ("fp8-channels", "int4", "bf16"):
        args, kwargs = drawn(ops.linear, other).make()
        with pytest.raises(NotImplementedError, match="DeepGEMM"):
            deep_gemm.prepare_linear(*args, **kwargs)


def test_deep_gemm_says_why_it_is_missing():
    assert "Hopper" in deep_gemm.unavailable("cpu")
    module = importlib.import_module(deep_gemm.MODULE)
    for name in ("fp8_gemm_nt", "get_col_major_tma_aligned_tensor", "is_deep_gemm_supported"):
        assert callable(getattr(module, name))


@pytest.mark.parametrize("kind", ["bf16", "fp8-blocks", "fp8-channels"])
def test_experts_reach_vllms_triton_kernels(monkeypatch, kind):
    signature = inspect.signature(importlib.import_module(f"{FUSED_MOE}.fused_moe").fused_experts)
    seen = []

    def fused_experts(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        seen.append(given["quant_config"])
        return given["hidden_states"]

    monkeypatch.setattr(f"{FUSED_MOE}.fused_experts", fused_experts)
    monkeypatch.setattr(torch.ops._moe_C, "moe_align_block_size", None, raising=False)
    args, kwargs = drawn(ops.fused_experts, kind).make()
    run = peers.implementation("vllm_triton", ops.fused_experts)
    run(*args, **kwargs)
    (config,) = seen
    assert config.use_fp8_w8a8 == (kind != "bf16")
    assert config.block_shape == ([128, 128] if kind == "fp8-blocks" else None)
    assert config.per_act_token_quant == config.per_out_ch_quant == (kind == "fp8-channels")
    assert kind == "bf16" or config.w1_scale is kwargs["w1_scale"]


@pytest.mark.parametrize("kind", ["int4", "mxfp4"])
def test_other_experts_are_left_out_with_a_reason(monkeypatch, kind):
    monkeypatch.setattr(torch.ops._moe_C, "moe_align_block_size", None, raising=False)
    args, kwargs = drawn(ops.fused_experts, kind).make()
    with pytest.raises(NotImplementedError, match="fp8"):
        peers.implementation("vllm_triton", ops.fused_experts)(*args, **kwargs)


def test_what_compiled_products_lack_is_left_out_with_a_reason():
    args, kwargs = drawn(ops.linear, "bf16").make()
    with pytest.raises(NotImplementedError, match="without scales"):
        vllm_compiled.prepare_linear(*args, **kwargs)
    args, kwargs = drawn(ops.linear, "fp8-channels").make()
    with pytest.raises(NotImplementedError, match="granularity"):
        vllm_compiled.prepare_linear(*args, **kwargs | {"x_scale": torch.ones(1, 3)})


def test_torch_compile_never_runs_a_reference_eagerly():
    """PyTorch would only warn, from so many cases of an op on."""
    assert callable(peers.implementation("torch_compile", ops.relu2))
    cases = 10**6
    compiled = CacheSizeRelevantForFrame(*[cases for _ in dataclasses.fields(CacheSizeRelevantForFrame)])
    exceeds, *_ = exceeds_recompile_limit(compiled, CompileId(frame_id=0, frame_compile_id=cases))
    assert not exceeds


def test_helpers_are_no_peers():
    assert "deep_gemm" in peers.NAMES and not [name for name in peers.NAMES if name.startswith("_")]
