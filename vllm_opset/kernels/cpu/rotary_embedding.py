"""rotary_embedding in as few calls as PyTorch allows: it computes both elements of all pairs at once."""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.ops.rope.rotary_embedding import check_arguments, pairs

# The sign of the sine for the first and for the second element of a pair.
SIGNS = torch.tensor([[-1.0], [1.0]], device="cpu")


@kernel(ops.rotary_embedding, name="cpu")
def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool = True,
) -> None:
    rotary_dim = check_arguments(positions, query, key, head_size, cos_sin_cache)
    rows = cos_sin_cache.index_select(0, positions).float()
    cos, sin = rows.view(-1, 1, 1, rotary_dim).chunk(2, -1)
    signed_sin = sin * SIGNS
    rotate(pairs(query, head_size, rotary_dim, is_neox_style), cos, signed_sin)
    if key is not None:
        rotate(pairs(key, head_size, rotary_dim, is_neox_style), cos, signed_sin)


def rotate(pairs: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> None:
    wide = pairs.float()
    swapped = wide.flip(2)
    pairs.copy_(wide.mul_(cos).addcmul_(swapped, signed_sin))
