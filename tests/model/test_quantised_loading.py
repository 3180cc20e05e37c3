"""Fused layers with fp8 weights are refused if a part of them ends inside a block."""

from types import SimpleNamespace

import pytest

from vllm_opset.model.loading import check_blocks
from vllm_opset.unsupported import Refusal

LAYER = SimpleNamespace(prefix="layers.0.gate_up_proj")


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
