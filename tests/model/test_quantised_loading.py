"""Errors name a quantised tensor that does not fit or is missing, and a watched layer is freed with its model."""

import gc
import re
import weakref
from types import SimpleNamespace
from unittest.mock import Mock

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
        self.copy(param.data[2 * loaded_shard_id :], loaded_weight)

    @staticmethod
    def copy(rows: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        rows[: len(loaded_weight)] = loaded_weight


@pytest.mark.parametrize(
    "raised", [ValueError("input_scales of w1 and w3 of a layer must be equal"), AssertionError(), IndexError("row")]
)
def test_an_error_of_a_loader_is_quoted_with_the_name_of_the_tensor(raised, monkeypatch):
    monkeypatch.setattr(Linear, "copy", Mock(side_effect=raised))
    layer = Linear()
    said = (
        "layers.0.gate_up_proj.weight (1) cannot be loaded: [2, 4] in the checkpoint, into [4, 4] "
        f"(all parts, in this worker): {raised!r}"
    )
    with pytest.raises(ValueError, match=re.escape(said)):
        layer.weight.weight_loader(param=layer.weight, loaded_weight=torch.ones(2, 4), loaded_shard_id=1)


def test_an_error_of_memory_while_weights_are_loaded_stays_one(monkeypatch):
    monkeypatch.setattr(Linear, "copy", Mock(side_effect=torch.OutOfMemoryError))
    layer = Linear()
    with pytest.raises(torch.OutOfMemoryError):
        layer.weight.weight_loader(layer.weight, torch.ones(2, 4), 1)


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
