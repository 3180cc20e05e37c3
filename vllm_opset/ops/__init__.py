"""The ops: one file per op, which holds its contract. The contract's body is the reference in plain PyTorch.

See `contract`.
"""

from vllm_opset.ops.activation.fatrelu_and_mul import fatrelu_and_mul
from vllm_opset.ops.activation.gelu import gelu
from vllm_opset.ops.activation.gelu_and_mul import gelu_and_mul
from vllm_opset.ops.activation.gelu_and_mul_sparse import gelu_and_mul_sparse
from vllm_opset.ops.activation.gelu_fast import gelu_fast
from vllm_opset.ops.activation.gelu_new import gelu_new
from vllm_opset.ops.activation.gelu_tanh import gelu_tanh
from vllm_opset.ops.activation.mul_and_silu import mul_and_silu
from vllm_opset.ops.activation.quick_gelu import quick_gelu
from vllm_opset.ops.activation.relu2 import relu2
from vllm_opset.ops.activation.silu_and_mul import silu_and_mul
from vllm_opset.ops.activation.silu_and_mul_quant import silu_and_mul_quant
from vllm_opset.ops.activation.silu_and_mul_with_clamp import silu_and_mul_with_clamp
from vllm_opset.ops.activation.situ_and_mul import situ_and_mul
from vllm_opset.ops.activation.swigluoai_and_mul import swigluoai_and_mul
from vllm_opset.ops.activation.swiglustep_and_mul import swiglustep_and_mul
from vllm_opset.ops.attention.paged_attention import paged_attention
from vllm_opset.ops.cache.compute_slot_mapping import compute_slot_mapping
from vllm_opset.ops.cache.reshape_and_cache import reshape_and_cache
from vllm_opset.ops.contract import Op
from vllm_opset.ops.gemm.linear import linear
from vllm_opset.ops.moe.combine import combine
from vllm_opset.ops.moe.fused_experts import fused_experts
from vllm_opset.ops.moe.grouped_gemm import grouped_gemm
from vllm_opset.ops.moe.permute import permute
from vllm_opset.ops.moe.route import route
from vllm_opset.ops.norm.fused_add_rms_norm import fused_add_rms_norm
from vllm_opset.ops.norm.fused_add_rms_norm_quant import fused_add_rms_norm_quant
from vllm_opset.ops.norm.layer_norm import layer_norm
from vllm_opset.ops.norm.rms_norm import rms_norm
from vllm_opset.ops.norm.rms_norm_gated import rms_norm_gated
from vllm_opset.ops.norm.rms_norm_quant import rms_norm_quant
from vllm_opset.ops.quantisation.quantise import quantise
from vllm_opset.ops.rope.apply_rotary_emb import apply_rotary_emb
from vllm_opset.ops.rope.qk_norm_rope_cache import qk_norm_rope_cache
from vllm_opset.ops.rope.rope_cache import rope_cache
from vllm_opset.ops.rope.rotary_embedding import rotary_embedding
from vllm_opset.ops.sampling.apply_penalties import apply_penalties
from vllm_opset.ops.sampling.top_k_top_p_sample import top_k_top_p_sample

# Sorted by family and name, as the imports are. This is the order of all reports.
ALL: tuple[Op, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Op))
BY_NAME: dict[str, Op] = {op.name: op for op in ALL}
