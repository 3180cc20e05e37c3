"""Layers of experts outside a model, and what they compute."""

import torch
from vllm.model_executor.layers import fused_moe
from vllm.model_executor.layers.fused_moe import MoERunner

# Releases after 0.27 call it a factory.
FusedMoE = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE
BLOCK = 128
NUM_EXPERTS, TOP_K, HIDDEN_SIZE, WIDTH = 8, 3, 32, 16


def by_hand(
    w13: torch.Tensor, w2: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """The experts' results, one token and expert after the other, in fp64."""
    found, w13, w2 = torch.zeros_like(x, dtype=torch.float64), w13.double(), w2.double()
    for token in range(len(x)):
        for weight, expert in zip(weights[token], ids[token], strict=True):
            gate, up = (w13[expert] @ x[token].double()).chunk(2)
            found[token] += weight * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
    return found


def assert_computes(made: MoERunner, w13: torch.Tensor, w2: torch.Tensor) -> None:
    """Compares the results of four experts with quantised weights with the formula, for these values of the weights."""
    logits, x = torch.randn(5, 4), torch.randn(5, BLOCK).bfloat16()
    weights, ids = logits.double().softmax(-1).topk(2)
    expected = by_hand(w13, w2, x, weights / weights.sum(-1, keepdim=True), ids)
    found = made._quant_method.apply_monolithic(made.routed_experts, x, logits)
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.02 * expected.abs().max().item())
