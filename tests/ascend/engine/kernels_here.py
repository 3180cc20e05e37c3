"""Prints as JSON the kernel of each op on this process's NPU, for a model that vLLM runs in fp16 and bf16."""

import json

import torch

from vllm_opset import ops, selection

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
