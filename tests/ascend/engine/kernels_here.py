"""Prints as JSON the kernel of each op on this process's NPU, for a model that vLLM runs in fp16 and bf16."""

import json

import torch

from vllm_opset import ops, selection
from vllm_opset.ops.schemes import INT8, PER_ROW, Quantised, Scheme

W8A8 = Scheme(Quantised(INT8, PER_ROW), Quantised(INT8, PER_ROW))
CACHE = {"num_kv_heads": 2, "head_size": 64, "block_size": 128, "split_kv_layout": True}


def problems(dtype: torch.dtype):
    cache = {**CACHE, "kv_cache_dtype": dtype}
    yield ops.rms_norm, {"dtype": dtype, "hidden_size": 64, "weight_dtype": dtype}
    yield ops.fused_add_rms_norm, {"dtype": dtype, "hidden_size": 64, "weight_dtype": dtype}
    rotary = {"head_size": 64, "rotary_dim": 64, "is_neox_style": True, "table_dtype": dtype}
    yield ops.rotary_embedding, {"dtype": dtype, **rotary}
    yield ops.silu_and_mul, {"dtype": dtype}
    yield ops.reshape_and_cache, {"dtype": dtype, **cache}
    yield ops.paged_attention, {"dtype": dtype, **cache, "num_heads": 4}
    yield ops.route, {"dtype": dtype, "num_experts": 128, "top_k": 8}
    sizes = {"num_experts": 128, "hidden_size": 64, "intermediate_size": 96}
    yield ops.fused_experts, {"dtype": dtype, **sizes}
    yield ops.quantise, {"dtype": dtype, "to_dtype": INT8, "group": PER_ROW, "static": False, "columns": 64}
    yield ops.linear, {"dtype": dtype, "in_features": 64, "out_features": 96, "scheme": W8A8}
    yield ops.top_k_top_p_sample, {"dtype": torch.float32, "vocab_size": 320}


print(
    json.dumps(
        {
            str(dtype).removeprefix("torch."): {
                op.name: selection.select(op, op.problem(device="npu", **problem)).kernel.name
                for op, problem in problems(dtype)
            }
            for dtype in (torch.float16, torch.bfloat16)
        }
    )
)
