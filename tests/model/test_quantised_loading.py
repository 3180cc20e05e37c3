"""Errors name a quantised tensor that does not fit or is missing, and a watched layer is freed with its model."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from vllm_opset.model.loading import check_blocks, watch
from vllm_opset.unsupported import Refusal

LAYER = SimpleNamespace(prefix="layers.0.gate_up_proj")


class Linear(torch.nn.Module):
    """A fused layer of two rows each, whose parameters are loaded by a bound method, as vLLM's are."""

    def __init__(self, number: int = 2) -> None:
        super().__init__()
        self.prefix, self.output_partition_sizes = "layers.0.gate_up_proj", [2] * number
        for name, columns in (("weight", 4), ("weight_scale", 1)):
            parameter = torch.nn.Parameter(torch.zeros(2 * number, columns), requires_grad=False)
            parameter.weight_loader = self.load
            self.register_parameter(name, parameter)
        watch(self)

    def load(self, param: torch.Tensor, loaded_weight: torch.Tensor, loaded_shard_id=None) -> None:
        first = 2 * (loaded_shard_id if isinstance(loaded_shard_id, int) else 0)
        param.data[first : first + len(loaded_weight)].copy_(loaded_weight)


def test_a_watched_layer_is_freed_with_its_model():
    layer = Linear()
    record_metadata_for_reloading(layer)
    freed = weakref.ref(layer)
    del layer
    gc.collect()
    assert freed() is None


@pytest.mark.parametrize(
    ("widths", "out_features"), [((128, 256), 384), ((128, 64), 192), ((192,), 192), ((128, 128), 512)]
)
def test_parts_may_end_with_a_block_and_the_last_one_with_the_weight(widths, out_features):
    check_blocks(LAYER, (128, 64), widths, out_features)


@pytest.mark.parametrize(
    ("widths", "out_features", "cure"),
    [
        ((64, 128), 192, "choose a checkpoint with scales per channel"),
        ((128, 64), 384, "give a smaller --tensor-parallel-size"),
        ((64,), 128, "give a smaller --tensor-parallel-size"),
    ],
)
def test_a_part_that_ends_inside_a_block_is_refused(widths, out_features, cure):
    parts = ", ".join(map(str, widths))
    said = rf"fp8 blocks of 128 x 64 in layers\.0\.gate_up_proj, whose parts of {parts} rows end inside a block: {cure}"
    with pytest.raises(Refusal, match=said):
        check_blocks(LAYER, (128, 64), widths, out_features)
