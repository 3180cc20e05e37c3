"""The variant of linear that multiplies an int4 weight on an NVIDIA GPU depends on the call."""

import pytest
import torch

from vllm_opset import ops, targets
from vllm_opset.kernels.triton import linear
from vllm_opset.kernels.triton._products import int4, load_sm90
from vllm_opset.kernels.triton.linear import ring
from vllm_opset.targets import Target


@pytest.mark.parametrize(
    ("variant", "num_tokens", "columns", "groups", "how"),
    [
        ("ring", 1, 256, 2, {}),
        ("ring", 8, 256, 1, {}),
        ("packed_sm90", 9, 256, 1, {}),
        ("packed_sm90", 256, 256, 2, {}),
        ("packed_sm90", 1, 256, 8, {}),  # groups of 32, which `ring` does not take
        ("packed_sm90", 256, 256, 4, {}),  # groups of 64
        ("dequantised", 257, 256, 8, {}),
        ("dequantised", 257, 256, 2, {}),
        ("ring", 128, 256, 1, {"target": Target("nvidia", "sm80")}),
        ("packed", 1, 256, 4, {"target": Target("nvidia", "sm80")}),  # two scales in a tile
        ("packed_sm90", 1, 160, 1, {}),  # no whole tiles
        ("packed", 1, 160, 5, {}),
        ("packed", 1, 256, 2, {"dtype": torch.float32}),
        ("packed_sm90", 2, 256, 2, {"stride": 264}),  # rows that are aligned for the copy engine alone
        ("packed", 2, 256, 2, {"stride": 260}),  # rows that are not aligned
        ("packed", 2, 256, 2, {"first": 1}),  # nor is the first one
        ("packed", 1, 256, 2, {"target": Target("amd", "gfx942")}),
    ],
)
def test_the_variant_of_int4(variant, num_tokens, columns, groups, how, monkeypatch):
    for module in (load_sm90, int4, ring):
        monkeypatch.setattr(module, "INTERPRETED", False)
    dtype, stride, first = how.get("dtype", torch.bfloat16), how.get("stride", columns), how.get("first", 0)
    x = torch.zeros(num_tokens * stride + 16, dtype=dtype)[first:].as_strided((num_tokens, columns), (stride, 1), first)
    weight, scale = torch.zeros(48, columns // 2, dtype=torch.uint8), torch.ones(48, groups)
    with targets.instead(how.get("target", Target("nvidia", "sm90"))):
        call = linear.describe(x, weight, None, scale)
    assert linear.VARIANTS.pick(call) == variant


def test_pytorch_heeds_zero_points():
    """The variant `torch` serves int4 weights only if a user names it."""
    samples = {sample.name: sample for sample in ops.linear.samples("cpu", torch.float32)}
    args, kwargs = samples["int4 by groups of 64, zero points"].make()
    want = ops.linear.reference(*args, **kwargs)
    torch.testing.assert_close(linear.linear(*args, **kwargs, variant="torch"), want)


@pytest.mark.parametrize(
    ("able", "columns", "groups", "how"),
    [
        (True, 256, 2, {}),
        (True, 160, 1, {}),  # the last stage ends beyond the columns
        (True, 256, 8, {}),  # groups of 32
        (True, 256, 4, {}),
        (False, 160, 5, {}),  # the last stage's groups end beyond the columns
        (False, 96, 1, {}),  # less than a stage
        (False, 256, 2, {"dtype": torch.float32}),
        (False, 256, 2, {"stride": 260}),  # rows that the copy engine does not take
        (False, 256, 2, {"target": Target("nvidia", "sm80")}),
    ],
)
def test_what_the_kernel_for_hopper_can_multiply(able, columns, groups, how, monkeypatch):
    for module in (load_sm90, int4, ring):
        monkeypatch.setattr(module, "INTERPRETED", False)
    x = torch.zeros(2, how.get("stride", columns), dtype=how.get("dtype", torch.bfloat16))[:, :columns]
    weight, scale = torch.zeros(48, columns // 2, dtype=torch.uint8), torch.ones(48, groups)
    with targets.instead(how.get("target", Target("nvidia", "sm90"))):
        call = linear.describe(x, weight, None, scale)
    assert ("packed_sm90" in linear.VARIANTS.able(call)) == able
