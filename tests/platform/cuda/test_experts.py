"""Mixtures of experts on a GPU that is not there: the choice of kernels, and the launches of the warm-up."""

import importlib
import importlib.util
import random
from types import SimpleNamespace

import pytest
import torch
from paged_launches import Recorder

from vllm_opset import ops, selection, targets
from vllm_opset.kernel import kernels_of
from vllm_opset.model.experts import Experts, multiply
from vllm_opset.ops.contract import DTYPES
from vllm_opset.ops.moe.route import RouteProblem
from vllm_opset.ops.schemes import (
    FP8,
    MXFP4,
    PACKED,
    PER_ROW,
    PER_TENSOR,
    UINT4,
    GroupShape,
    Quantised,
    Scheme,
)
from vllm_opset.platform.refusals import check_graphs
from vllm_opset.targets import Target

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or not importlib.util.find_spec("triton"),
    reason="launches nothing, for a Hopper GPU that is not there: runs where there is Triton, and no GPU",
)

NUM_STEPS = 200
HIDDEN_SIZE, WIDTH = 192, 160  # more than the 128 columns of a kernel's unit
INT4, INT4_IN_32 = Quantised(UINT4, PER_ROW), Quantised(UINT4, GroupShape(1, 32))
# Experts, those of a token, the most tokens of a step, and how the weights are stored. uint8: MXFP4.
MODELS = {
    "Qwen3-MoE": (128, 8, 8192, torch.bfloat16),
    "Mixtral": (8, 2, 2048, torch.bfloat16),
    "Qwen2-MoE": (60, 4, 5000, torch.bfloat16),
    "six of 160": (160, 6, 3000, torch.bfloat16),
    "OLMoE, small steps": (64, 8, 100, torch.bfloat16),
    "Qwen3-MoE, fp8": (128, 8, 8192, FP8),
    "gpt-oss, MXFP4": (32, 4, 8192, torch.uint8),
    "Qwen3-MoE, int4": (128, 8, 8192, INT4),
    "Qwen3-MoE, int4 in groups of 32": (128, 8, 8192, INT4_IN_32),
}
KERNELS = {
    "route": ("_route",),
    "permute": ("_count", "_place"),
    "grouped_gemm.unquantised": ("_grouped_gemm",),
    "grouped_gemm.scaled": ("_scaled_grouped_gemm",),
    "grouped_gemm.mxfp4": ("_mxfp4_grouped_gemm",),
    "grouped_gemm.int4": ("_int4_grouped_gemm",),
    "_products.scaled_calls_sm90": ("scaled_gemm_sm90",),
    "grouped_gemm.mxfp4_sm90": ("mxfp4_gemm_sm90",),
    "grouped_gemm.decode_sm90": ("experts_decode_sm90",),
    "grouped_gemm.wide_decode_sm90": ("_arrange_by_expert", "int4_experts_decode_sm90"),
    "grouped_gemm.packed_sm90": ("packed_experts_sm90",),
    "quantise": ("_quantise",),
    "combine": ("_combine",),
    "silu_and_mul_quant": ("_silu_and_mul_quant",),
    "_activation": ("_gated",),
}
# The kernels for weights that are stored so on a Hopper GPU; the others multiply by weights as they are.
OF_WEIGHTS = {
    FP8: {"_scaled_grouped_gemm", "scaled_gemm_sm90", "_quantise", "_silu_and_mul_quant"},
    torch.uint8: {"experts_decode_sm90", "mxfp4_gemm_sm90", "packed_experts_sm90"},
    INT4: {"_arrange_by_expert", "int4_experts_decode_sm90", "packed_experts_sm90"},
    INT4_IN_32: {"experts_decode_sm90", "_int4_grouped_gemm"},
}


@pytest.fixture
def launched(monkeypatch):
    """A set that collects all that Triton compiles anew for: the name, integers and constants of each launch."""
    found = set()

    def recorder(name: str, kernel) -> Recorder:
        specialised = [not parameter.do_not_specialize for parameter in kernel.params]

        def record(name: str, inputs: tuple, options: dict) -> None:
            values = (
                value if isinstance(value, int | None) and counts else type(value)
                for value, counts in zip(inputs, specialised, strict=False)
            )
            found.add((name, *values, *sorted(options.items())))

        return Recorder(name, record)

    for module, names in KERNELS.items():
        loaded = importlib.import_module(f"vllm_opset.kernels.triton.{module}")
        for name in names:
            monkeypatch.setattr(loaded, name, recorder(name, getattr(loaded, name)))
    return found


def experts_layer(num_experts: int, top_k: int, stored: torch.dtype | Quantised) -> torch.nn.Module:
    """A layer of experts with the attributes that its experts read. Its kernels are those for GPUs."""
    layer = torch.nn.Module()
    packed = stored in (torch.uint8, INT4, INT4_IN_32)
    values = 2 if packed else 1  # of an element
    w13 = torch.zeros(num_experts, 2 * WIDTH, HIDDEN_SIZE // values)
    w2 = torch.zeros(num_experts, HIDDEN_SIZE, WIDTH // values)
    layer.w13_weight, layer.w2_weight = (
        torch.nn.Parameter(weight.to(PACKED if packed else stored), False) for weight in (w13, w2)
    )
    layer.activation, layer.apply_router_weight_on_input, layer.expert_map = SimpleNamespace(value="silu"), False, None
    layer.moe_config = SimpleNamespace()
    layer.swiglu_limit = layer.swiglu_alpha = layer.swiglu_beta = None
    layer.custom_routing_function, layer.use_grouped_topk = None, False
    layer.top_k, layer.global_num_experts, layer.num_expert_group = top_k, num_experts, None
    layer.scoring_func, layer.renormalize, layer.routed_scaling_factor = "softmax", True, 1.0
    layer.e_score_correction_bias = None
    moe = SimpleNamespace(router_logits_dtype=torch.float32, in_dtype=torch.bfloat16)
    how = {}
    if stored is FP8:
        scale = torch.ones(num_experts, 1, 1)
        how = {"w1_scale": scale, "w2_scale": scale, "out_dtype": torch.bfloat16, "quant_dtype": FP8}
        how |= {"scheme": Scheme(Quantised(FP8, PER_TENSOR), Quantised(FP8, PER_ROW)), "group_shape": list(PER_ROW)}
    if stored is torch.uint8:
        scales = (torch.zeros(*weight.shape[:2], weight.shape[2] // 16).to(stored) for weight in (w13, w2))
        scales = (scale.mT.contiguous().mT for scale in scales)  # as the kernel prepares them
        how = {**dict(zip(("w1_scale", "w2_scale"), scales, strict=True)), "out_dtype": torch.bfloat16}
        how |= {"scheme": Scheme(MXFP4)}
    if isinstance(stored, Quantised):
        groups = (1 if stored is INT4 else size // stored.group.columns for size in (HIDDEN_SIZE, WIDTH))
        scales = (torch.zeros(*w.shape[:2], number).bfloat16() for w, number in zip((w13, w2), groups, strict=True))
        how = {**dict(zip(("w1_scale", "w2_scale"), scales, strict=True)), "out_dtype": torch.bfloat16}
        how |= {"scheme": Scheme(stored)}
    experts = Experts(layer, moe, **how)
    experts._route[torch.float32] = kernels_of("route")["triton"].run
    experts._experts[torch.bfloat16] = kernels_of("fused_experts")["triton"].run
    return layer


@pytest.mark.parametrize("model", MODELS)
def test_all_that_serving_launches_was_launched_before(model, launched):
    num_experts, top_k, most_tokens, stored = MODELS[model]
    layer = experts_layer(num_experts, top_k, stored)
    multiply(torch.nn.ModuleList([layer]), most_tokens)
    warm = set(launched)
    own = OF_WEIGHTS.get(stored, {"_grouped_gemm"}) | (set() if stored is FP8 else {"_gated"})
    others = {"_grouped_gemm", "_gated", *KERNELS["grouped_gemm.mxfp4"]}.union(*OF_WEIGHTS.values()) - own
    assert {name for name, *_ in warm} >= {name for names in KERNELS.values() for name in names} - {"_count"} - others
    draw = random.Random(0)
    for _ in range(NUM_STEPS):
        num_tokens = min(most_tokens, draw.randint(1, draw.choice((16, 300, most_tokens))))
        x = torch.zeros(num_tokens, HIDDEN_SIZE, dtype=torch.bfloat16)
        layer.opset_experts(x, torch.zeros(num_tokens, num_experts))
        assert launched == warm, f"{num_tokens} tokens"


@pytest.mark.parametrize(("num_tokens", "variant"), [(1, "decode"), (64, "decode"), (4096, "prefill")])
def test_few_tokens_decode(num_tokens, variant):
    """At Qwen3-30B-A3B's number of experts."""
    from vllm_opset.kernels.triton.fused_experts import VARIANTS

    ids = torch.zeros(num_tokens, 8, dtype=torch.int32)
    assert VARIANTS.of(None, None, torch.zeros(128, 1, 1), None, None, ids) == variant


@pytest.mark.parametrize("target", ["nvidia/sm80", "nvidia/sm90", "nvidia/sm120"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight", [None, Quantised(FP8, GroupShape(128, 128))], ids=str)
def test_a_gpu_gets_kernels_that_a_graph_can_capture(target, dtype, weight):
    problems = {
        ops.route: RouteProblem("cuda", dtype, 128, 8),
        ops.fused_experts: ops.fused_experts.problem(
            "cuda", dtype, Scheme(weight), num_experts=128, hidden_size=2048, intermediate_size=768
        ),
    }
    with targets.instead(Target(*target.split("/"))):
        choices = [selection.select(op, problem) for op, problem in problems.items()]
    assert [choice.kernel.name for choice in choices] == ["triton", "triton"]
    check_graphs(choices)
