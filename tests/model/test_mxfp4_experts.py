"""The method of gpt-oss's experts, without an engine."""

from types import SimpleNamespace

import pytest
import torch

from vllm_opset.model.mxfp4_experts import OpsetMxfp4ExpertsMethod
from vllm_opset.unsupported import Refusal


@pytest.mark.parametrize("sizes", [(96, 48), (80, 64)])
def test_rows_that_are_no_whole_groups_are_refused_before_they_are_loaded(sizes):
    """Two workers would share the 96 columns of the second product as 48 each, one and a half groups of a scale."""
    method = object.__new__(OpsetMxfp4ExpertsMethod)
    method.moe = SimpleNamespace(has_bias=True, w13_num_shards=2)
    with pytest.raises(Refusal, match="no multiple of 32: give a smaller --tensor-parallel-size, or"):
        method.create_weights(torch.nn.Module(), 4, *sizes, params_dtype=torch.float32)
