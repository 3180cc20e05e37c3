"""A variant of top_k_top_p_sample that an override asks for draws the same tokens as the one that the table takes."""

import pytest
import torch

from vllm_opset import ops
from vllm_opset.kernel import kernels_of
from vllm_opset.kernels.triton import INTERPRETED
from vllm_opset.ops import _samples

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="test_triton.py runs it, with TRITON_INTERPRET=1"),
    # NumPy warns of logits of −inf, with which lists are padded.
    pytest.mark.filterwarnings("ignore:(invalid value|divide by zero) encountered:RuntimeWarning"),
]


@pytest.mark.parametrize(
    ("given", "able"),
    [
        ({}, ["unfiltered", "top_k", "all_filters"]),
        ({"top_k": torch.tensor([5, 5003, 300], dtype=torch.int32)}, ["top_k", "all_filters"]),
        ({"top_k": torch.tensor([5, 5003, 300], dtype=torch.int32), "top_p": torch.ones(3)}, ["all_filters"]),
    ],
    ids=str,
)
def test_each_variant_that_can_run_a_call_draws_the_same(given, able):
    kernel, rng = kernels_of("top_k_top_p_sample")["triton"], _samples.generator("variants")
    logits, keys = torch.randn(3, 5003, generator=rng), torch.arange(3)
    assert kernel.variants.able(kernel.variants.describe(logits, keys, **given)) == able
    expected, _ = ops.top_k_top_p_sample.reference(logits, keys, **given)
    for variant in able:
        assert torch.equal(kernel.run(logits, keys, **given, variant=variant)[0], expected), variant
