"""The configuration of a checkpoint says whether all of its quantised weights are in fp8."""

from types import SimpleNamespace

import pytest

from vllm_opset.platform.quantised_weights import in_fp8

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
