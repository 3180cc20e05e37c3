"""Overrides that have no effect: vLLM's own code computes the op, or nothing calls it."""

from collections.abc import Iterator, Mapping

from vllm_opset import ops
from vllm_opset.ops.contract import Op
from vllm_opset.selection import Override

# The parts that an op needs, all of them. Every op that is not in this table needs `ops` alone. No part chooses a
# kernel for an op with an empty row.
NEEDED: Mapping[Op, tuple[str, ...]] = {
    ops.paged_attention: ("attention",),
    ops.reshape_and_cache: ("attention",),
    ops.rope_cache: ("attention", "ops"),
    ops.qk_norm_rope_cache: ("attention", "ops"),
    ops.top_k_top_p_sample: ("sampler",),
    ops.linear: ("linear",),
    ops.quantise: ("linear",),
    ops.route: ("moe",),
    ops.fused_experts: ("moe",),
    ops.grouped_gemm: (),
    ops.permute: (),
    ops.combine: (),
    ops.apply_penalties: (),
    ops.compute_slot_mapping: (),
    ops.rms_norm_quant: (),
    ops.fused_add_rms_norm_quant: (),
    ops.silu_and_mul_quant: (),
}

# They are the steps of fused_experts, and its kernels have their own.
BY_NO_LAYER = (ops.permute, ops.grouped_gemm, ops.combine)


# The second model runner has kernels of its own for these.
BY_FIRST_RUNNER = (ops.apply_penalties, ops.compute_slot_mapping)


def not_called(overrides: Mapping[str, Override], second_runner: bool) -> Iterator[str]:
    """Yields a warning for each override of an op that nothing calls, where opset's kernels serve all layers."""
    for name, override in overrides.items():
        effect = f"{override.source} asks for {name}={override.kernel}, which has no effect: "
        if ops.BY_NAME[name] in BY_NO_LAYER:
            yield f"{effect}no layer calls this op. The kernel of fused_experts has steps of its own"
        elif second_runner and ops.BY_NAME[name] in BY_FIRST_RUNNER:
            yield f"{effect}only vLLM's first model runner calls this op, and the second one serves"


def without_effect(overrides: Mapping[str, Override], on: Mapping[str, bool]) -> Iterator[str]:
    """Yields a warning for each override that no part obeys on stock vLLM. on: the parts that are on."""
    for name, override in overrides.items():
        needed = NEEDED.get(ops.BY_NAME[name], ("ops",))
        off = [part for part in needed if part not in on]
        effect = f"{override.source} asks for {name}={override.kernel}, which has no effect: "
        if not needed:
            yield f"{effect}no part of vllm-opset chooses a kernel for this op beside vLLM's compiled kernels"
        elif off:
            switches = ",".join(f"{part}=on" for part in off)
            yield (
                f"{effect}vLLM's own code serves, since these parts of vllm-opset are off: {', '.join(off)}. "
                f"Switch them on by OPSET_NATIVE={switches}, or set OPSET_PLATFORM=cuda"
            )
