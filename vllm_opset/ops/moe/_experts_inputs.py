"""Random inputs of fused_experts, with NaN where no result may see it."""

import torch

from vllm_opset.ops import _samples
from vllm_opset.ops.moe import _activations


def experts_arguments(
    name, ids, device, dtype, num_experts, hidden_size, width, *, bias=False, shared=False, here=None, on="cpu", **how
):
    """Arguments of fused_experts for the experts `ids` of the tokens.

    here: the number of experts whose weights there are, by default all. how: keyword arguments of the op.
    """
    rng = _samples.generator(name, on)
    here = num_experts if here is None else here
    halves = 2 if how.get("activation", "silu") in _activations.GATED else 1

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return _samples.normal(shape, dtype, device, rng, std)

    hidden_states = normal(len(ids), hidden_size)
    w1, w2 = (
        normal(here, halves * width, hidden_size, std=hidden_size**-0.5),
        normal(here, hidden_size, width, std=width**-0.5),
    )
    if bias:
        how |= {"w1_bias": normal(here, halves * width), "w2_bias": normal(here, hidden_size)}
    if shared:
        how["shared_output"] = normal(len(ids), hidden_size)
    weights = torch.rand(ids.shape, generator=rng, device=rng.device).to(device)
    if ids.shape[1] > 1:  # the weight of a single choice would be 1, as if there were none
        weights /= weights.sum(dim=-1, keepdim=True)
    weights[ids < 0] = torch.nan
    if here == num_experts:
        # The weights of experts without tokens, and the tokens of padded rows, must not be seen in other rows.
        absent = sorted(set(range(num_experts)) - set(ids.flatten().tolist()))
        w1[absent], w2[absent] = torch.nan, torch.nan
    hidden_states[(ids < 0).all(dim=1)] = torch.nan
    return (hidden_states, w1, w2, weights, ids), how
