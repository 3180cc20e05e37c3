"""Whether the quantised weights of a checkpoint are all in fp8, and whether they are served, by its configuration."""

from types import SimpleNamespace

import pytest

from vllm_opset.platform.quantised_weights import in_fp8, unserved

FP8, INT8, FP4 = ({"type": kind, "num_bits": bits} for kind, bits in (("float", 8), ("int", 8), ("float", 4)))
FP8_TOKEN = FP8 | {"strategy": "token", "dynamic": True}
OF_ATTENTION = {"targets": ["Qwen3Attention"], "weights": None, "input_activations": FP8}


def compressed(*weights: dict) -> dict:
    return {"config_groups": {f"group_{i}": {"weights": one} for i, one in enumerate(weights)}}


def grouped(weights: dict | None, activations: dict | None, **others: dict) -> dict:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"config_groups": {"group_0": group} | others}


def model_of(method: str | None, checkpoint: dict | None, is_moe: bool = False) -> SimpleNamespace:
    architecture = SimpleNamespace(quantization_config=checkpoint)
    return SimpleNamespace(quantization=method, is_moe=is_moe, model_arch_config=architecture)


@pytest.mark.parametrize(
    ("method", "checkpoint", "expected"),
    [
        ("fp8", None, True),  # also by --quantization, of a checkpoint that says nothing
        ("awq", {"bits": 4}, False),
        (None, None, False),
        ("compressed-tensors", compressed(FP8), True),
        ("compressed-tensors", compressed(FP8, FP8), True),
        ("compressed-tensors", compressed(FP8, INT8), False),
        ("compressed-tensors", grouped(FP8, FP8_TOKEN, group_1=OF_ATTENTION), True),
        ("compressed-tensors", compressed(FP4), False),
        ("compressed-tensors", {}, False),
    ],
)
def test_weights_in_fp8(method, checkpoint, expected):
    assert in_fp8(model_of(method, checkpoint)) is expected


@pytest.mark.parametrize(
    ("rows", "columns", "served"),
    [(128, 128, True), (32, 64, True), (96, 128, False), (128, 96, False), (16, 128, False), (128, 16, False)],
)
def test_blocks_are_refused_by_their_sizes_before_weights_are_loaded(rows, columns, served):
    expected = [] if served else [f"fp8 blocks of {rows} x {columns}"]
    by_blocks = FP8 | {"strategy": "block", "block_structure": [rows, columns]}
    of_x = FP8 | {"strategy": "group", "group_size": columns, "dynamic": True}
    for method, checkpoint in (
        ("fp8", {"weight_block_size": [rows, columns]}),
        ("compressed-tensors", grouped(by_blocks, of_x)),
        ("compressed-tensors", grouped(by_blocks | {"block_structure": f"{rows}x{columns}"}, of_x)),
    ):
        assert [*unserved(model_of(method, checkpoint))] == expected


FP8_CHANNEL = FP8 | {"strategy": "channel"}


@pytest.mark.parametrize(
    ("checkpoint", "said"),
    [
        (grouped(FP8_CHANNEL, FP8_TOKEN, group_1=OF_ATTENTION), None),
        (grouped(FP8_CHANNEL, FP8), "experts of 8-bit float channel weights for 8-bit float tensor activations"),
        (grouped(None, FP8), "quantised activations alone"),
    ],
    ids=["a group of attention", "activations that name no strategy", "no weights"],
)
def test_groups_of_compressed_tensors_may_leave_settings_out(checkpoint, said):
    expected = [] if said is None else [f"{said} (group_0 of compressed-tensors)"]
    assert [*unserved(model_of("compressed-tensors", checkpoint, is_moe=True))] == expected
