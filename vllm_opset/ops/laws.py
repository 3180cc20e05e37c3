"""Laws that many ops share."""

import math
from collections.abc import Callable

import torch

from vllm_opset.ops import samples
from vllm_opset.ops.contract import Op


def rows_are_independent(op: Op, call: Callable[[Callable, torch.Tensor], torch.Tensor]) -> None:
    """Gives an op the property that a row's result does not depend on the other rows, bit for bit.

    call: `(implementation, x [rows, 64]) -> result`, with the op's further arguments filled in.
    """

    def rows_are_independent(run: Callable, device: str, dtype: torch.dtype) -> None:
        x = samples.normal((6, 64), dtype, device, samples.generator("rows"))
        poisoned = x.clone()
        poisoned[1::2] = math.nan
        alone, among_nan = call(run, x)[::2], call(run, poisoned)[::2]
        assert torch.equal(alone, among_nan), "NaN in one row changes another"

    op.property_(rows_are_independent)
