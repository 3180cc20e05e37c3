import pytest
import torch

from vllm_opset import ops
from vllm_opset.ops.moe.fused_experts import check_expert_map


def test_a_map_that_names_no_expert_is_refused_by_the_name_of_the_tensor():
    with pytest.raises(ValueError, match=r"layers\.3\.expert_map names no expert: all of its 8 entries are -1"):
        check_expert_map(torch.full((8,), -1, dtype=torch.int32), 4, "layers.3.expert_map")


def test_a_map_that_names_experts_without_weights_is_refused():
    with pytest.raises(ValueError, match="expert_map names experts from 0 to 4, and there are 4"):
        check_expert_map(torch.tensor([0, -1, 4]), 4)
    check_expert_map(torch.tensor([0, -1, 3]), 4)


def test_it_is_the_composition_of_the_other_ops():
    """In fp64, for one sample with all that the ops have in common."""
    (sample,) = (s for s in ops.fused_experts.samples("cpu", torch.float64) if s.name == "gpt-oss")
    (x, w1, w2, weights, ids), how = sample.make()
    # Here the weights of experts without tokens are NaN, and linear sums over them in no op.
    order = ops.permute(ids, len(w1), 16)
    middle = ops.swigluoai_and_mul(ops.grouped_gemm(x, w1, *order, ids.shape[1], how["w1_bias"]))
    results = ops.grouped_gemm(middle, w2, *order, 1, how["w2_bias"])
    together = ops.combine(results.view(*ids.shape, -1), weights)
    torch.testing.assert_close(together, ops.fused_experts(x, w1, w2, weights, ids, **how), rtol=1e-6, atol=1e-6)
