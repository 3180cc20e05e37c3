"""probes.py CONSTANT CANDIDATE [DEVICE]: tries on an NPU the points on which the documents contradict each other.

Never run on hardware. Each probe has the name of a constant of `kernels/ascend/_constraints.py` and lists the values
that the constant could have. Each of these candidates is tried in a process of its own, because a wrong call may leave
the process without a usable device. Prints one line of JSON: the reason why the candidate does not work, or null.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_opset import ops, parity, targets
from vllm_opset.kernel import Kernel, kernels_of
from vllm_opset.kernels.ascend import _constraints
from vllm_opset.ops.attention._paged_inputs import SPLIT_KV, PagedCase

DTYPE = torch.float16  # every product supports it
SLOTS = [31, 3, 0, 511, 130]
NUM_KEYS, LEFT = 300, 20  # of a request over three blocks, and within a window
# By operator: the kernel that calls it.
CALLERS = {
    "npu_rms_norm": "rms_norm=ascend",
    "npu_add_rms_norm": "fused_add_rms_norm=ascend",
    "npu_layer_norm_eval": "layer_norm=ascend",
    "npu_swiglu": "silu_and_mul=ascend",
    "npu_geglu": "gelu_and_mul=ascend",
    "npu_gelu": "gelu_new=ascend",
    "npu_fast_gelu": "quick_gelu=ascend",
    "npu_mrope": "rotary_embedding=ascend",
    "npu_rotary_mul": "rotary_embedding=ascend_rotary_mul",
    "_npu_rotary_embedding": "rotary_embedding=ascend_atb",
    "npu_scatter_pa_kv_cache": "reshape_and_cache=ascend_scatter",
    "_npu_reshape_and_cache": "reshape_and_cache=ascend",
    "npu_fused_infer_attention_score": "paged_attention=ascend",
    "_npu_paged_attention": "paged_attention=ascend_atb",
    "npu_top_k_top_p": "top_k_top_p_sample=ascend",
    "npu_moe_gating_top_k_softmax": "route=ascend",
    "npu_moe_gating_top_k": "route=ascend_gating_top_k",
    "npu_moe_init_routing_v2": "fused_experts=ascend",
    "npu_grouped_matmul": "fused_experts=ascend",
    "npu_moe_finalize_routing": "fused_experts=ascend",
    "npu_dynamic_quant": "quantise=ascend",
    "npu_quant_matmul": "linear=ascend",
}


@dataclass(frozen=True)
class Probe:
    """candidates: possible values of the constant. why_not: tries one on a device. promised: whether the constant has
    it.
    """

    candidates: Callable[[], tuple]
    why_not: Callable[[str, object], str | None]
    promised: Callable[[object], bool]

    def attempt(self, device: str, candidate: object) -> str | None:
        """The reason why a candidate does not work, or None."""
        try:
            return self.why_not(device, candidate)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


PROBES: dict[str, Probe] = {}


def _soc() -> str:
    return targets.of("npu").architecture


def settles(constant: str, *candidates: object, promised: Callable[[object], bool] | None = None):
    """Registers the decorated function as the probe of a constant, which is one candidate or a tuple of some."""

    def stands_there(candidate: object) -> bool:
        value = getattr(_constraints, constant)
        return candidate in value if isinstance(value, tuple) else candidate == value

    def register(why_not: Callable[[str, object], str | None]):
        PROBES[constant] = Probe(lambda: candidates or (_soc(),), why_not, promised or stands_there)
        return why_not

    return register


# Attention


@settles("PRE_TOKENS_EXTRA", 0, 1)
def pre_tokens_extra(device: str, extra: int) -> str | None:
    return _unless(LEFT, keys_before(device, num_queries=5, pre_tokens=LEFT + extra))


@settles("BAND_HOLDS_FOR_ONE_QUERY", True)
def band_holds_for_one_query(device: str, _) -> str | None:
    several, one = (keys_before(device, num_queries, LEFT) for num_queries in (5, 1))
    return _unless(several, one)


@settles("ATTENTION_HEAD_SIZES", 32, 64, 80, 96, 112, 128, 192, 256)
def attention_head_sizes(device: str, head_size: int) -> str | None:
    return attends(
        device, "ascend", PagedCase(((1, 300), (20, 150)), layout=SPLIT_KV, head_size=head_size, block_size=128)
    )


@settles("ATTENTION_BLOCK_SIZES", 16, 32, 64, 128, 256, 512)
def attention_block_sizes(device: str, block_size: int) -> str | None:
    return attends(device, "ascend", PagedCase(((1, 700), (20, 150)), layout=SPLIT_KV, block_size=block_size))


@settles("ATB_BLOCK_TABLE_ON_HOST", False, True)
def atb_block_table_on_host(device: str, on_host: bool) -> str | None:
    with patch.object(_constraints, "ATB_BLOCK_TABLE_ON_HOST", on_host):
        return attends(device, "ascend_atb", PagedCase(((1, 300), (1, 129)), layout=SPLIT_KV, block_size=128))


# The cache


@settles("SCATTER_PA_KV_CACHE_SOCS")
def scatter_pa_kv_cache_socs(device: str, _) -> str | None:
    return writes(device, partial(torch.ops.npu.npu_scatter_pa_kv_cache, cache_mode="Norm"), SLOTS, torch.int32)


@settles("SCATTER_SLOT_DTYPES", torch.int32, torch.int64)
def scatter_slot_dtypes(device: str, dtype: torch.dtype) -> str | None:
    return writes(device, partial(torch.ops.npu.npu_scatter_pa_kv_cache, cache_mode="Norm"), SLOTS, dtype)


@settles("ATB_SLOT_DTYPE", torch.int32, torch.int64)
def atb_slot_dtype(device: str, dtype: torch.dtype) -> str | None:
    return writes(device, torch.ops.atb._npu_reshape_and_cache, SLOTS, dtype)


@settles("ATB_SKIPS_NEGATIVE_SLOTS", True)
def atb_skips_negative_slots(device: str, _) -> str | None:
    slots = [-1, *SLOTS, -1]
    return writes(device, torch.ops.atb._npu_reshape_and_cache, slots, _constraints.ATB_SLOT_DTYPE)


# Experts


@settles("GATING_MAX_EXPERTS", 64, 128, 256, 2048, promised=lambda count: count <= _constraints.GATING_MAX_EXPERTS)
def gating_max_experts(device: str, num_experts: int) -> str | None:
    """By softmax and without groups, for which an earlier release knew no number of experts."""
    logits = torch.randn(5, num_experts, generator=torch.Generator().manual_seed(0))
    _, ids, _ = torch.ops.npu.npu_moe_gating_top_k(logits.to(device), 8)
    return None if torch.equal(ids.cpu().long(), logits.topk(8).indices) else "other experts were chosen"


@settles("FINALIZE_DROP_PAD_MODE", _constraints.BY_COLUMNS, _constraints.BY_ROWS)
def finalize_drop_pad_mode(device: str, mode: int) -> str | None:
    kernel, samples = kernels_of("fused_experts")["ascend"], ops.fused_experts.samples(device, DTYPE)
    sample = next(sample for sample in samples if sample.name == "16 tokens")
    with patch.object(_constraints, "FINALIZE_DROP_PAD_MODE", mode):
        return parity.check_sample(ops.fused_experts, kernel, sample, DTYPE).failure


# Others


@settles("INTERLEAVED", "interleave", "interleaved")
def interleaved(device: str, name: str) -> str | None:
    kernel, samples = kernels_of("rotary_embedding")["ascend"], ops.rotary_embedding.samples(device, DTYPE)
    sample = next(sample for sample in samples if sample.name == "GPT-J, half of each head")
    with patch.object(_constraints, "INTERLEAVED", name):
        return parity.check_sample(ops.rotary_embedding, kernel, sample, DTYPE).failure


@settles("OPERATORS", *CALLERS, promised=lambda name: _soc() in _constraints.OPERATORS[name].socs)
def operators(device: str, name: str) -> str | None:
    """Whether the operator is correct here, whatever products its documents name."""
    op_name, kernel_name = CALLERS[name].split("=")
    op, kernel = ops.BY_NAME[op_name], kernels_of(op_name)[kernel_name]
    anywhere = dataclasses.replace(_constraints.OPERATORS[name], socs=(_soc(),))
    with patch.dict(_constraints.OPERATORS, {name: anywhere}):
        for sample in (sample for dtype in (DTYPE, torch.float32) for sample in op.samples(device, dtype)):
            args, kwargs = sample.make()
            problem = op.problem_for(*args, **kwargs)
            reason = kernel.supports(problem)
            if reason is None:
                with Met(name) as met:
                    check = parity.check_sample(op, kernel, sample, problem.dtype)
                if met.calls:
                    return check.failure
    return reason or "no sample called it"


class Met(TorchDispatchMode):
    """Counts the calls of one operator."""

    def __init__(self, operator: str) -> None:
        super().__init__()
        self.operator, self.calls = operator, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func._schema.name.endswith(f"::{self.operator}")
        return func(*args, **(kwargs or {}))


# Helpers


def keys_before(device: str, num_queries: int, pre_tokens: int) -> int:
    """How many keys before its own the last query of a request sees, in a band.

    All scores are equal, and each of the last keys has its own column of the values. The result is above zero in the
    columns of the keys that the query sees.
    """
    from vllm_opset.kernels.ascend import paged_attention

    size = 64
    query = torch.zeros(num_queries, 1, size, dtype=DTYPE)
    keys, values = (torch.zeros(3 * 128, size, dtype=DTYPE) for _ in range(2))
    values[NUM_KEYS - size : NUM_KEYS] = torch.eye(size, dtype=DTYPE)
    pages = [2, 0, 1]
    key_cache, value_cache = (torch.empty(3, 128, size, dtype=DTYPE) for _ in range(2))
    key_cache[pages], value_cache[pages] = keys.view(3, 128, size), values.view(3, 128, size)
    out, _ = torch.ops.npu.npu_fused_infer_attention_score(
        *(tensor.to(device) for tensor in (query, key_cache, value_cache)),
        atten_mask=paged_attention.causal_mask(torch.device(device)),
        actual_seq_lengths=[num_queries],
        actual_seq_lengths_kv=[NUM_KEYS],
        block_table=torch.tensor([pages], dtype=torch.int32, device=device),
        num_heads=1,
        num_key_value_heads=1,
        scale=1.0,
        input_layout="TND",
        sparse_mode=paged_attention.BAND,
        block_size=128,
        pre_tokens=pre_tokens,
        next_tokens=0,
    )
    return int((out[-1, 0].cpu() > 0).sum()) - 1


def attends(device: str, kernel_name: str, case: PagedCase) -> str | None:
    """The reason why a kernel of paged_attention is wrong for a case, or None. The case may have any shape."""
    kernel = dataclasses.replace(kernels_of("paged_attention")[kernel_name], supports=lambda problem: None)
    return parity.check_sample(ops.paged_attention, kernel, case.sample("probe", device, DTYPE), DTYPE).failure


def writes(device: str, operator: Callable, slots: list[int], dtype: torch.dtype) -> str | None:
    """The reason why an operator does not write tokens to exactly these slots, or None."""
    rng = torch.Generator().manual_seed(0)
    tokens = [torch.randn(len(slots), 2, 64, generator=rng).to(DTYPE) for _ in range(2)]
    caches = [torch.zeros(4, 128, 2, 64, dtype=DTYPE, device=device) for _ in range(2)]
    operator(*(x.to(device) for x in tokens), *caches, torch.tensor(slots, dtype=dtype, device=device))
    for cache, written in zip(caches, tokens, strict=True):
        want = torch.zeros(4 * 128, 2, 64, dtype=DTYPE)
        used = torch.tensor(slots) >= 0
        want[torch.tensor(slots)[used]] = written[used]
        wrong = (cache.cpu().flatten(0, 1) != want).any(dim=(1, 2)).nonzero().flatten().tolist()
        if wrong:
            return f"slots {wrong[:8]} of the cache do not hold what was written"
    return None


def _unless(want: int, have: int) -> str | None:
    return None if have == want else f"the last query sees {have} keys before its own, not {want}"


def all_candidates() -> Iterator[tuple[str, object]]:
    for constant, probe in PROBES.items():
        for candidate in probe.candidates():
            yield constant, candidate


def kernels() -> list[Kernel]:
    """Every Ascend kernel, in the order of the ops."""
    return [k for op in ops.ALL for k in kernels_of(op.name).values() if k.provider == "ascend"]


if __name__ == "__main__":
    constant, word, device = sys.argv[1], sys.argv[2], (sys.argv[3:] or ["npu"])[0]
    kernels()  # imports torch_npu
    probe = PROBES[constant]
    (candidate,) = [candidate for candidate in probe.candidates() if str(candidate) == word]
    print(json.dumps(probe.attempt(device, candidate)))
