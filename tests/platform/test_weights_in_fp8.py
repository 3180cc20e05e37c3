"""Whether the quantised weights of a checkpoint are all in fp8, and whether they are served, by its configuration."""

from types import SimpleNamespace

import pytest

from vllm_opset.platform.quantised_weights import in_fp8, unserved

FP8, INT8, FP4 = ({"type": kind, "num_bits": bits} for kind, bits in (("float", 8), ("int", 8), ("float", 4)))


def compressed(*weights: dict) -> dict:
    return {"config_groups": {f"group_{i}": {"weights": one} for i, one in enumerate(weights)}}


@pytest.mark.parametrize(
    ("method", "checkpoint", "expected"),
    [
        ("fp8", None, True),  # also by --quantization, of a checkpoint that says nothing
        ("awq", {"bits": 4}, False),
        (None, None, False),
        ("compressed-tensors", compressed(FP8), True),
        ("compressed-tensors", compressed(FP8, FP8), True),
        ("compressed-tensors", compressed(FP8, INT8), False),
        ("compressed-tensors", compressed(FP4), False),
        ("compressed-tensors", {}, False),
    ],
)
def test_weights_in_fp8(method, checkpoint, expected):
    model = SimpleNamespace(quantization=method, model_arch_config=SimpleNamespace(quantization_config=checkpoint))
    assert in_fp8(model) is expected


@pytest.mark.parametrize(
    ("rows", "columns", "served"),
    [(128, 128, True), (32, 64, True), (96, 128, False), (128, 96, False), (16, 128, False), (128, 16, False)],
)
def test_blocks_are_refused_by_their_sizes_before_weights_are_loaded(rows, columns, served):
    expected = [] if served else [f"fp8 blocks of {rows} x {columns}"]
    by_blocks = FP8 | {"strategy": "block", "block_structure": [rows, columns]}
    by_compressed_tensors = compressed(by_blocks)
    by_compressed_tensors["config_groups"]["group_0"]["input_activations"] = FP8 | {"strategy": "group"}
    for method, checkpoint in (
        ("fp8", {"weight_block_size": [rows, columns]}),
        ("compressed-tensors", by_compressed_tensors),
    ):
        architecture = SimpleNamespace(quantization_config=checkpoint)
        model = SimpleNamespace(quantization=method, is_moe=False, model_arch_config=architecture)
        assert [*unserved(model)] == expected
