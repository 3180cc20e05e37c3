"""A decode layer in a replayed CUDA graph, whose kernels allow the next launch before they wait (`early_launch`).

A kernel that read too early would find what the replay before left in memory, which is other values each time.
"""

from types import SimpleNamespace

import pytest
import torch

from vllm_opset.kernel import kernels_of
from vllm_opset.ops.attention.paged_batch import PagedBatch
from vllm_opset.ops.schemes import FP8, PER_ROW, GroupShape

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="needs an NVIDIA GPU from Hopper on: runs on one",
)
HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, INTERMEDIATE, CONTEXT, BLOCK_SIZE = 1024, 8, 2, 128, 3072, 300, 16
LAYERS, REPLAYS = 6, 8
# The groups of weights in fp8, and those of what they multiply.
BY_ROWS, BY_BLOCKS = (PER_ROW, PER_ROW), (GroupShape(128, 128), GroupShape(1, 128))
Groups = tuple[GroupShape, GroupShape] | None


def layer(rng: torch.Generator, num_tokens: int, dtype: torch.dtype, groups: Groups) -> SimpleNamespace:
    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=rng, device="cuda") * shape[-1] ** -0.5).to(dtype)

    def weight(*shape: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        if groups is None:
            return normal(*shape), None
        scale = 1 + torch.rand(groups[0].scale_shape(shape), generator=rng, device="cuda")
        return torch.randn(*shape, generator=rng, device="cuda").to(FP8), scale * shape[-1] ** -0.5

    blocks = num_tokens * (CONTEXT // BLOCK_SIZE + 1)
    return SimpleNamespace(
        norms=[1 + normal(HIDDEN) for _ in range(2)],
        head_norms=[1 + normal(HEAD_SIZE) for _ in range(2)],
        qkv=weight((HEADS + 2 * KV_HEADS) * HEAD_SIZE, HIDDEN),
        o=weight(HIDDEN, HEADS * HEAD_SIZE),
        gate_up=weight(2 * INTERMEDIATE, HIDDEN),
        down=weight(HIDDEN, INTERMEDIATE),
        kv_cache=torch.randn(blocks, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE, generator=rng, device="cuda").to(dtype),
    )


def forward(layers: list[SimpleNamespace], hidden: torch.Tensor, groups: Groups, fused: bool, between) -> torch.Tensor:
    """The layers' kernels, one after the other. fused: whether one kernel rotates and writes the cache.

    between: is called after each kernel.
    """
    quantised = () if groups is None else (FP8, list(groups[1]))

    def run(op: str, *args, **options):
        result = kernels_of(op)["triton"].run(*args, **options)
        between()
        return result

    def normed(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor):
        if quantised:
            return run("fused_add_rms_norm_quant", x, residual, weight, 1e-6, *quantised)
        run("fused_add_rms_norm", x, residual, weight, 1e-6)
        return x, None

    def product(x, weight) -> torch.Tensor:
        return run("linear", x[0], weight[0], None, weight[1], x[1], hidden.dtype)

    num_tokens, device = len(hidden), hidden.device
    table = torch.arange(num_tokens * (CONTEXT // BLOCK_SIZE + 1), dtype=torch.int32, device=device)
    table = table.view(num_tokens, -1)
    lens = torch.full((num_tokens,), CONTEXT, dtype=torch.int32, device=device)
    batch = PagedBatch(torch.arange(num_tokens + 1, dtype=torch.int32, device=device), lens, table, 1, CONTEXT)
    positions = (lens - 1).long()
    slots = table[:, (CONTEXT - 1) // BLOCK_SIZE].long() * BLOCK_SIZE + (CONTEXT - 1) % BLOCK_SIZE
    angles = torch.arange(CONTEXT, device=device)[:, None] / 10 ** torch.linspace(0, 4, HEAD_SIZE // 2, device=device)
    cos_sin_cache = torch.cat((angles.cos(), angles.sin()), 1)
    x, residual = hidden.clone(), hidden.clone()
    for each in layers:
        qkv = product(normed(x, residual, each.norms[0]), each.qkv).unflatten(1, (-1, HEAD_SIZE))
        query, key, value = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
        if fused:
            rotated = query, key, value, *each.head_norms, 1e-6, positions, cos_sin_cache, True
            run("qk_norm_rope_cache", *rotated, each.kv_cache, slots)
        else:
            run("rotary_embedding", positions, query.flatten(1), key.flatten(1), HEAD_SIZE, cos_sin_cache)
            run("reshape_and_cache", key, value, each.kv_cache, slots)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        run("paged_attention", query, each.kv_cache, batch, out, scale=HEAD_SIZE**-0.5)
        x = product(run("quantise", out.flatten(1), *quantised) if quantised else (out.flatten(1), None), each.o)
        gate_up = product(normed(x, residual, each.norms[1]), each.gate_up)
        if quantised:
            x = product(run("silu_and_mul_quant", gate_up, *quantised), each.down)
        else:
            x = product((run("silu_and_mul", gate_up), None), each.down)
    return x + residual


@pytest.mark.parametrize("fused", [True, False], ids=["qk_norm_rope_cache", "rotary_embedding"])
@pytest.mark.parametrize(
    ("dtype", "groups"),
    [(torch.bfloat16, None), (torch.float32, None), (torch.bfloat16, BY_ROWS), (torch.bfloat16, BY_BLOCKS)],
    ids=["bf16", "fp32", "fp8 by rows", "fp8 by blocks"],
)
@pytest.mark.parametrize("num_tokens", [1, 2, 9, 64, 130])
def test_a_captured_layer_computes_what_its_kernels_do_one_by_one(num_tokens, dtype, groups, fused):
    rng = torch.Generator("cuda").manual_seed(num_tokens)
    layers = [layer(rng, num_tokens, dtype, groups) for _ in range(LAYERS)]
    inputs = [torch.randn(num_tokens, HIDDEN, generator=rng, device="cuda").to(dtype) for _ in range(REPLAYS)]
    side = torch.cuda.Stream()  # Counters of a stream are made before it captures, so the graph need not clear them.
    with torch.cuda.stream(side):
        wanted = [forward(layers, hidden, groups, fused, torch.cuda.synchronize) for hidden in inputs]
        hidden = inputs[0].clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        got = forward(layers, hidden, groups, fused, lambda: None)
        graph.capture_end()
        for values, result in zip(inputs, wanted, strict=True):
            hidden.copy_(values)
            graph.replay()
            assert torch.equal(got, result)
