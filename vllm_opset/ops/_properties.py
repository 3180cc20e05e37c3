"""Properties that many ops share."""

import math
from collections.abc import Callable

import torch

from vllm_opset.ops import _samples
from vllm_opset.ops.contract import Op


def equal(claim: str, got: torch.Tensor, want: torch.Tensor, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Raises AssertionError if the tensors differ. The message states the claim, where they differ and by how much.

    NaN equals nothing.
    """
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol, msg=lambda difference: f"{claim}: {difference}")


def rows_are_independent(op: Op, call: Callable[[Callable, torch.Tensor], torch.Tensor]) -> None:
    """Gives an op this property: the result of a row does not depend on the other rows, bit for bit.

    call: `(implementation, x [rows, 64]) -> result`, with the op's further arguments filled in.
    """

    def rows_are_independent(run: Callable, device: str, dtype: torch.dtype) -> None:
        x = _samples.normal((6, 64), dtype, device, _samples.generator("rows"))
        poisoned = x.clone()
        poisoned[1::2] = math.nan
        alone, among_nan = call(run, x)[::2], call(run, poisoned)[::2]
        equal("NaN in one row changes another", among_nan, alone)

    op.property_(rows_are_independent)
