"""The documented limits of torch_npu's operators, for `supports` and for the emulation of the operators.

Sources, with the names used below:

- docs: torch_npu's own docstrings (torch_npu/_op_plugin_docs.py of 2.13.0), by operator.

- CANN: the pages of the aclnn functions that the operators call in the end.

- vllm-ascend: the behaviour of Huawei's plugin for vLLM (v0.23 and main of August 2026), if the documents are silent.

- op-plugin, ATB: the tests and checks in the open repositories of torch_npu's operators and of the ATB library.

Nothing here was tried on hardware. For each point on which documents disagree, there is one named constant with both
sources beside it. `make test-ascend-hardware` has a probe of the same name that settles the point.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from vllm_opset.ops.contract import Problem

A2, A3, A5, P310 = "A2", "A3", "A5", "310P"

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Limits:
    """The limits of one operator. dtypes: dtypes of the activations. socs: NPUs with the operator. source: evidence."""

    dtypes: tuple[torch.dtype, ...]
    socs: tuple[str, ...]
    source: str


# Conflict: docs of npu_scatter_pa_kv_cache name A2 and A3. A comment in InfiniOps (CANN 8.5.1) says that it exists only
# on A5, and a release of vllm-ascend went back to the ATB operator. This table follows the docs. On A2 and A3 the ATB
# operator comes first, so this one serves only A5 and fp32, which the ATB operator does not take.
SCATTER_PA_KV_CACHE_SOCS = (A2, A3, A5)

OPERATORS = {
    "npu_rms_norm": Limits(FLOATS, (A2, A3, A5, P310), "docs, which name no product; vllm-ascend calls it on all"),
    "npu_add_rms_norm": Limits(FLOATS, (A2, A3), "CANN aclnnAddRmsNorm; vllm-ascend avoids it on 310P"),
    "npu_layer_norm_eval": Limits(FLOATS, (A2, A3, A5, P310), "docs, which name no product: as F.layer_norm"),
    "npu_swiglu": Limits(FLOATS, (A2, A3), "docs for A2; vllm-ascend calls it on A3"),
    "npu_geglu": Limits(FLOATS, (A2, A3), "docs for A2 (bf16); CANN aclnnGeGluV3"),
    "npu_gelu": Limits(FLOATS, (A2, A3), "CANN aclnnGeluV2; not in docs"),
    "npu_fast_gelu": Limits(FLOATS, (A2, A3, P310), "docs"),
    "npu_mrope": Limits(FLOATS, (A2, A3), "docs for dtypes, CANN aclnnRopeWithSinCosCache for products"),
    "npu_rotary_mul": Limits(FLOATS, (A2, A3), "docs, jit_compile=False"),
    "_npu_rotary_embedding": Limits(HALVES, (A2, A3), "not in docs; vllm-ascend"),
    "npu_scatter_pa_kv_cache": Limits(FLOATS, SCATTER_PA_KV_CACHE_SOCS, "docs; see SCATTER_PA_KV_CACHE_SOCS"),
    "_npu_reshape_and_cache": Limits(HALVES, (A2, A3), "not in docs; vllm-ascend v0.23"),
    "npu_fused_infer_attention_score": Limits(HALVES, (A2, A3), "docs"),
    "_npu_paged_attention": Limits(HALVES, (A2, A3), "not in docs; op-plugin's test for 910B; vllm-ascend: not on A5"),
    "npu_top_k_top_p": Limits(FLOATS, (A2, A3), "docs"),
    "npu_moe_gating_top_k_softmax": Limits(FLOATS, (A2, A3), "docs for A2; CANN aclnnMoeGatingTopKSoftmax"),
    "npu_moe_gating_top_k": Limits(FLOATS, (A2, A3), "docs, which name no product; CANN aclnnMoeGatingTopK"),
    "npu_moe_init_routing_v2": Limits(FLOATS, (A2, A3), "docs"),
    "npu_grouped_matmul": Limits(FLOATS, (A2, A3), "docs for A2; CANN aclnnGroupedMatmulV5"),
    "npu_moe_finalize_routing": Limits(FLOATS, (A2, A3), "docs for A2; CANN aclnnMoeFinalizeRoutingV2"),
    "npu_dynamic_quant": Limits(HALVES, (A2, A3), "docs"),
    "npu_quant_matmul": Limits(HALVES, (A2, A3), "docs; on 310P without scales of tokens"),
}
# 310P lacks bf16, according to the docs of npu_fast_gelu, the only docs that distinguish products.
BF16_SOCS = (A2, A3, A5)

# docs of npu_mrope: rotary_dim a multiple of 32 in 16 bits, of 16 in fp32; CANN: the head size too.
MROPE_MULTIPLE = {2: 32, 4: 16}
# docs of npu_rotary_mul: D < 896 and even; B * N < 1000 (interleave; in half, each).
ROTARY_MUL_MAX_WIDTH = 894
ROTARY_MUL_MAX_HEADS = 999
# Conflict: docs of npu_mrope and npu_rotary_mul call it "interleave", vllm-ascend passes "interleaved" to npu_mrope.
# op-plugin's code compares only with "half", so either should work.
INTERLEAVED = "interleave"

# docs of npu_scatter_pa_kv_cache: slots int32 or int64. vllm-ascend only ever passes int32.
SCATTER_SLOT_DTYPES = (torch.int32, torch.int64)
# Not in docs: int64 slots write nothing with _npu_reshape_and_cache (vllm-ascend #706, InfiniOps).
ATB_SLOT_DTYPE = torch.int32
# Not in docs: ATB's own test skips negative slots; vllm-ascend pads with -1.
ATB_SKIPS_NEGATIVE_SLOTS = True

# docs of npu_top_k_top_p: k in [1, 1024].
TOP_K_MAX = 1024

# Experts. docs of npu_moe_gating_top_k_softmax: k in [1, 1024].
GATING_SOFTMAX_MAX_K = 1024
# Conflict: what npu_moe_gating_top_k takes. docs: up to 2048 experts. docs of an earlier release, 7.0.0: 256 experts in
# 4 of 8 groups, with a bias, and k up to 32.
GATING_MAX_EXPERTS = 2048
# docs: the experts of a group are padded to a multiple of 32, and all of them must still be within the maximum. A group
# has more than two; CANN takes smaller ones.
GATING_ALIGNMENT = 32
GATING_MIN_GROUP = 3
# docs of npu_grouped_matmul: up to 1024 groups for one weight of three dimensions; last dimensions below 65536.
GROUPED_MATMUL_MAX_GROUPS = 1024
GROUPED_MATMUL_MAX_WIDTH = 65535
# Conflict: how npu_moe_finalize_routing reads its indices. npu_moe_init_routing_v2 gives them by rows, [rows, k]. docs:
# mode 0 alone, by columns. CANN: 0 by columns and 2 by rows. vllm-ascend passes 2.
FINALIZE_DROP_PAD_MODE = 0
BY_COLUMNS, BY_ROWS = 0, 2
# docs of npu_quant_matmul: last dimensions of x1 and x2 up to 65535.
QUANT_MATMUL_MAX_WIDTH = 65535

# Paged attention. docs of npu_fused_infer_attention_score say that TND does not work with paging, but they also
# describe the layout of a paged cache under TND. vllm-ascend always uses TND with a paged cache.
# Conflict: head sizes under TND. docs: 192 (v1), 128 and 192 (v2); CANN 8 refuses what is not 64, 128 or 192
# (vllm-ascend #9632); CANN's newest page for A2 says up to 256 with GQA. 64 and 128 run in vllm-ascend.
ATTENTION_HEAD_SIZES = (64, 128)
# Conflict: block sizes. docs: 128 … 512 in multiples of 128 for several queries, multiples of 16 up to 512 for one, and
# 128 recommended; CANN: multiples of 16 up to 1024 under TND, and up to 128 with GQA. 128 is in all of them.
ATTENTION_BLOCK_SIZES = (128,)
ATTENTION_MAX_HEADS = 256  # docs: N <= 256
ATTENTION_MAX_GROUP = 64  # docs: num_heads / num_key_value_heads <= 64
ATTENTION_MAX_ROW = 65535  # docs: KV_N * D <= 65535 for a cache [blocks, block_size, KV_N * D]
ATTENTION_MAX_REQUESTS = 4096  # CANN: batch <= 4096 under TND
ATTENTION_MAX_CACHE = 2**31 - 1  # docs: elements of key, and of value, within int32, if a request has one query
ATTENTION_MASK = 2048  # docs: sparse modes 2, 3 and 4 require a mask [2048, 2048], upper triangle one
# Conflict: the meaning of pre_tokens. The formula in the docs of npu_fusion_attention masks tril(-pre_tokens - 1). So a
# query sees pre_tokens keys before its own, W - 1 for vLLM's window W. But vllm-ascend passes W. The constant is added
# to the number of keys that a query should see before its own.
PRE_TOKENS_EXTRA = 0
# Conflict: whether a window applies to a request of one query. docs (v1) say that sparse mode and pre_tokens are
# ignored for it. vllm-ascend passes them and serves models with windows.
BAND_HOLDS_FOR_ONE_QUERY = True

# ATB's paged attention, for one query of each request. ATB, KVCacheDimCheck910B: heads of up to 576 elements, and for
# heads wider than 256, blocks of up to 128.
ATB_ATTENTION_MAX_HEAD_SIZE = 576
# Conflict: the location of its block table. op-plugin's test, ATB's example and vllm-ascend have only the lengths on
# the host and the block table on the device. InfiniOps says that both are read on the host.
ATB_BLOCK_TABLE_ON_HOST = False


def refused(operator: str, problem: Problem, namespace: str = "npu") -> str | None:
    """The reason why the operator cannot be called on the problem's NPU for its dtype, or None."""
    limits, here = OPERATORS[operator], problem.target.architecture
    if f"{namespace}::{operator}" not in problem.target.features:
        cure = "source the set_env.sh of NNAL (ATB)" if namespace == "atb" else "install a newer torch-npu"
        return f"torch_npu has no {operator} here: {cure}"
    if here not in limits.socs:
        return f"{operator} is documented for {', '.join(limits.socs)}, not for {here}"
    if problem.dtype not in limits.dtypes:
        return f"{operator} takes {names(limits.dtypes)}, not {names([problem.dtype])}"
    if problem.dtype == torch.bfloat16 and here not in BF16_SOCS:
        return f"there is no bfloat16 on {here}"
    return None


def mrope(dtype: torch.dtype, head_size: int, rotary_dim: int) -> str | None:
    """Checks the widths for npu_mrope. Like the functions below, returns the reason for a refusal, or None."""
    multiple = MROPE_MULTIPLE[dtype.itemsize]
    if head_size % multiple or rotary_dim % multiple:
        return f"npu_mrope wants multiples of {multiple}, not head_size={head_size} and rotary_dim={rotary_dim}"
    return None


def rotary_mul(head_size: int, rotary_dim: int) -> str | None:
    """Checks the widths for npu_rotary_mul."""
    if head_size > ROTARY_MUL_MAX_WIDTH:
        return f"npu_rotary_mul takes heads of up to {ROTARY_MUL_MAX_WIDTH}, not {head_size}"
    return full_width(head_size, rotary_dim)


def full_width(head_size: int, rotary_dim: int) -> str | None:
    """Checks the widths for operators that rotate whole heads."""
    if rotary_dim != head_size:
        return f"it rotates whole heads of {head_size}, not {rotary_dim} of their elements"
    return None


def gating_softmax(num_experts: int, top_k: int) -> str | None:
    """Checks the sizes for npu_moe_gating_top_k_softmax."""
    if not 1 <= top_k <= min(num_experts, GATING_SOFTMAX_MAX_K):
        return f"npu_moe_gating_top_k_softmax chooses 1 to {GATING_SOFTMAX_MAX_K} of the experts, not {top_k}"
    return None


def gating(num_experts: int, top_k: int, num_expert_group: int, topk_group: int) -> str | None:
    """Checks the sizes for npu_moe_gating_top_k."""
    if num_expert_group < 1 or num_experts % num_expert_group or not 1 <= topk_group <= num_expert_group:
        return f"{num_experts} experts are no {topk_group} of {num_expert_group} equal groups"
    size = num_experts // num_expert_group
    padded = -(-size // GATING_ALIGNMENT) * GATING_ALIGNMENT * num_expert_group
    if size < GATING_MIN_GROUP or max(num_experts, padded) > GATING_MAX_EXPERTS:
        return (
            f"npu_moe_gating_top_k takes groups of {GATING_MIN_GROUP} experts or more, up to {GATING_MAX_EXPERTS} "
            f"experts if groups are padded to multiples of {GATING_ALIGNMENT}, not {num_expert_group} groups of {size}"
        )
    if not 1 <= top_k <= size * topk_group:
        return f"{top_k} experts cannot be chosen of {size * topk_group}"
    return None


def grouped_matmul(num_groups: int, in_features: int) -> str | None:
    """Checks the sizes for npu_grouped_matmul with one weight, given as the transpose of its rows."""
    if not 1 <= num_groups <= GROUPED_MATMUL_MAX_GROUPS:
        return f"npu_grouped_matmul takes 1 to {GROUPED_MATMUL_MAX_GROUPS} experts, not {num_groups}"
    if in_features > GROUPED_MATMUL_MAX_WIDTH:
        return f"npu_grouped_matmul takes rows of up to {GROUPED_MATMUL_MAX_WIDTH}, not {in_features}"
    return None


def grouped_scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of npu_grouped_matmul's scales of int8 weights for results in `dtype`. docs: bf16 for bf16."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def grouped_bias_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of npu_grouped_matmul's biases for unquantised weights in `dtype`. docs: fp32 for bf16."""
    return torch.float16 if dtype == torch.float16 else torch.float32


def quant_matmul(in_features: int, out_features: int) -> str | None:
    """Checks the sizes for npu_quant_matmul."""
    if max(in_features, out_features) > QUANT_MATMUL_MAX_WIDTH:
        return f"npu_quant_matmul takes up to {QUANT_MATMUL_MAX_WIDTH} features, not {in_features} by {out_features}"
    return None


def attention(num_heads: int, num_kv_heads: int, head_size: int, block_size: int) -> str | None:
    """Checks the shapes for npu_fused_infer_attention_score, in layout TND over a paged cache."""
    if head_size not in ATTENTION_HEAD_SIZES:
        return f"documents agree on head sizes {_any(ATTENTION_HEAD_SIZES)}, not {head_size}"
    if block_size not in ATTENTION_BLOCK_SIZES:
        return f"documents agree on block size {_any(ATTENTION_BLOCK_SIZES)}, not {block_size}: set --block-size 128"
    if num_heads > ATTENTION_MAX_HEADS or num_heads // num_kv_heads > ATTENTION_MAX_GROUP:
        return (
            f"up to {ATTENTION_MAX_HEADS} heads, and {ATTENTION_MAX_GROUP} of a KV head, not {num_heads} and "
            f"{num_heads // num_kv_heads}"
        )
    if num_kv_heads * head_size > ATTENTION_MAX_ROW:
        return f"num_kv_heads * head_size may be up to {ATTENTION_MAX_ROW}, not {num_kv_heads * head_size}"
    return None


def attention_lengths(query_ends: list[int], seq_lens: list[int], num_rows: int) -> str | None:
    """Checks the host lists for npu_fused_infer_attention_score in layout TND. query_ends: without a leading 0."""
    if len(query_ends) != len(seq_lens) or len(query_ends) > ATTENTION_MAX_REQUESTS:
        return f"{len(query_ends)} ends for {len(seq_lens)} lengths, of {ATTENTION_MAX_REQUESTS} at most"
    if sorted(query_ends) != query_ends or min(seq_lens, default=0) < 0:
        return "query ends must not fall, and lengths not be negative"
    if num_rows != (query_ends[-1] if query_ends else 0):
        return f"the last query must end at row {num_rows}"
    return None


def scatter_slots(slots: torch.Tensor, num_slots: int) -> str | None:
    """Checks the slots for npu_scatter_pa_kv_cache: docs: in [0, num_slots - 1]. It reads them back: for emulation."""
    outside = ((slots < 0) | (slots >= num_slots)).any()
    return f"slots must lie in [0, {num_slots - 1}]" if outside else None


def atb_attention(num_heads: int, num_kv_heads: int, head_size: int, block_size: int) -> str | None:
    """Checks the shapes for _npu_paged_attention: blocks as for fused attention, head sizes within ATB's limit."""
    if num_heads % num_kv_heads or head_size > ATB_ATTENTION_MAX_HEAD_SIZE:
        return (
            f"heads of up to {ATB_ATTENTION_MAX_HEAD_SIZE} that share KV heads evenly, not {num_heads} of {head_size}"
        )
    if block_size not in ATTENTION_BLOCK_SIZES:
        return f"documents agree on block size {_any(ATTENTION_BLOCK_SIZES)}, not {block_size}: set --block-size 128"
    return None


def atb_lengths(context_lens: torch.Tensor, num_rows: int) -> str | None:
    """Checks the lengths for _npu_paged_attention: int32 on the host, one for each query."""
    if context_lens.device.type != "cpu" or context_lens.dtype != torch.int32 or context_lens.shape != (num_rows,):
        return f"context_lens must be int32 [{num_rows}] on the host"
    return "context_lens must be above zero" if num_rows and int(context_lens.min()) <= 0 else None


def atb_slots(slots: torch.Tensor) -> str | None:
    """Checks the slots for _npu_reshape_and_cache."""
    if slots.dtype != ATB_SLOT_DTYPE:
        return f"slots must be {names([ATB_SLOT_DTYPE])}, not {names([slots.dtype])}"
    return None if ATB_SKIPS_NEGATIVE_SLOTS or not (slots < 0).any() else "slots must not be negative"


def contiguous(**tensors: torch.Tensor) -> str | None:
    """Checks the tensors for operators that, according to the docs, take only contiguous tensors."""
    strided = [name for name, tensor in tensors.items() if not tensor.is_contiguous()]
    return f"{', '.join(strided)} must be contiguous" if strided else None


def names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _any(values: tuple[int, ...]) -> str:
    return " and ".join(map(str, values))
