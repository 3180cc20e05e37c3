"""The method of gpt-oss's experts, without an engine."""

from types import SimpleNamespace

import pytest
import torch

from vllm_opset.model.mxfp4_experts import OpsetMxfp4ExpertsMethod
from vllm_opset.unsupported import Refusal

FEWER_WORKERS, OTHER_WEIGHTS = "give a smaller --tensor-parallel-size, or", "choose another checkpoint"


@pytest.mark.parametrize(
    ("sizes", "workers", "cure"),
    [
        ((96, 48), 2, FEWER_WORKERS),
        ((96, 48), 1, OTHER_WEIGHTS),
        ((96, 40), 2, OTHER_WEIGHTS),
        ((80, 64), 2, OTHER_WEIGHTS),
    ],
)
def test_rows_that_are_no_whole_groups_are_refused_before_they_are_loaded(sizes, workers, cure):
    """Two workers share 96 columns of the second product as 48 each, one and a half groups of a scale.

    All workers have all columns of the first product, here 96 or 80.
    """
    method = object.__new__(OpsetMxfp4ExpertsMethod)
    method.moe = SimpleNamespace(has_bias=True, w13_num_shards=2, tp_size=workers)
    with pytest.raises(Refusal, match=f"no multiple of 32: {cure}"):
        method.create_weights(torch.nn.Module(), 4, *sizes, params_dtype=torch.float32)
