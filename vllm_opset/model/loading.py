"""What is checked of a layer's quantised weights before they are loaded. Errors name the layer."""

from collections.abc import Sequence

import torch

from vllm_opset.unsupported import Refusal


def prefix_of(layer: torch.nn.Module) -> str:
    """The name of a layer in its model. vLLM up to 0.30 tells that of a language model head to nobody."""
    names = (getattr(layer, name, None) for name in ("prefix", "layer_name"))
    return next(filter(None, names), type(layer).__name__)


def check_blocks(layer: torch.nn.Module, block: Sequence[int], widths: Sequence[int], out_features: int) -> None:
    """Raise Refusal if a part of a fused layer ends inside a block of rows that share scales.

    The next part then begins inside the block, and vLLM gives each part scales of its own from the next block on. Read
    as the scales of the whole weight, they would belong to other rows.

    block: the rows and columns of weights that share a scale. widths: the rows of each part in this worker.
    out_features: the rows in all workers.
    """
    is_split = sum(widths) < out_features  # so the last part, too, goes on in the next worker
    if not any(width % block[0] for width in (widths if is_split else widths[:-1])):
        return
    cure = "give a smaller --tensor-parallel-size" if is_split else "choose a checkpoint with scales per channel"
    raise Refusal(
        f"vllm-opset does not support fp8 blocks of {' x '.join(map(str, block))} in {prefix_of(layer)}, whose parts "
        f"of {', '.join(map(str, widths))} rows end inside a block: {cure}."
    )
