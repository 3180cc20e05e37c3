"""Quantisation schemes: which values share a scale, and what a stored tensor stands for."""

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from vllm_opset.ops import _samples, schemes
from vllm_opset.ops.schemes import FP8, MXFP4, PER_ROW, PER_TENSOR, UINT4, WHOLE, GroupShape, Quantised, Scheme

RNG = _samples.generator("test_schemes")
BLOCK = GroupShape(128, 128)


@pytest.mark.parametrize(
    ("shape", "scale", "group"),
    [
        ((64, 96), (1, 1), PER_TENSOR),
        ((64, 96), (64, 1), PER_ROW),
        ((1, 96), (1, 1), PER_TENSOR),  # one row is the whole
        ((0, 96), (0, 1), (1, WHOLE)),
        ((0, 96), (1, 1), PER_TENSOR),
        ((256, 384), (2, 3), BLOCK),
        ((150, 200), (2, 2), BLOCK),
        ((150, 100), (2, 1), (128, WHOLE)),  # a block holds all columns
        ((5, 384), (5, 3), (1, 128)),
        ((5, 160), (5, 5), (1, 32)),
    ],
)
def test_the_shape_of_a_scale_says_what_shares_it(shape, scale, group):
    assert schemes.group_of(shape, scale) == group
    assert GroupShape(*group).scale_shape(shape) == scale


@pytest.mark.parametrize("scale", [(3, 1), (5, 1), (0, 1), (65, 1), (1, 97), (64,), (64, 1, 1)])
def test_other_shapes_are_refused(scale):
    with pytest.raises(ValueError, match=r"groups of a power of two|must be a matrix"):
        schemes.group_of((64, 96), scale)


@pytest.mark.parametrize("shape", [(256, 384), (150, 200), (1, 77)])
@pytest.mark.parametrize("group", [PER_TENSOR, PER_ROW, BLOCK, GroupShape(1, 128)], ids=str)
def test_every_group_is_multiplied_by_its_own_scale(shape, group):
    """Compared with one value at a time. A group's largest value becomes the largest of fp8, and no error is larger
    than half a step.
    """
    values = _samples.normal(shape, torch.float32, "cpu", RNG)
    scale = schemes.scales_of(values, FP8, group)
    assert tuple(scale.shape) == group.scale_shape(shape)
    stored = schemes.stored(values, scale, FP8)
    stands_for = schemes.dequantise(stored, scale, torch.float64)
    sizes = [size if of == WHOLE else of for of, size in zip(group, shape, strict=True)]
    for row in range(0, shape[0], 37):
        for column in range(0, shape[1], 19):
            mine = scale[row // sizes[0], column // sizes[1]].double()
            assert stands_for[row, column] == stored[row, column].double() * mine
    error = (stands_for - values.double()).abs()
    assert (error <= values.abs() * 2**-4 * 1.0001 + schemes.expanded(scale, shape) * 2**-10).all()
    for rows, its_scales in zip(stored.float().split(sizes[0]), scale, strict=True):
        for group_values, _ in zip(rows.split(sizes[1], 1), its_scales, strict=True):
            assert group_values.abs().max() == 448


def test_zeros_and_values_out_of_range_are_stored():
    zeros = torch.zeros(2, 8)
    scale = schemes.scales_of(zeros, FP8, PER_ROW)
    assert (scale == 1 / (512 * 448)).all() and not schemes.stored(zeros, scale, FP8).float().any()
    large = schemes.stored(torch.tensor([[1e6, -1e6]]), torch.ones(1, 1), FP8)
    assert large.float().tolist() == [[448, -448]]


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (None, r"weight_scale is missing: a weight of \[256, 384\] quantised 128x128 needs one of \[2, 3\]"),
        (torch.ones(256, 1), r"weight_scale is \[256, 1\]; a weight of .* needs \[2, 3\]"),
        (torch.full((2, 3), float("nan")), "weight_scale holds NaN"),
        (torch.full((2, 3), torch.finfo(torch.float32).min), "weight_scale holds NaN, infinity or the lowest number"),
    ],
)
def test_a_wrong_scale_is_named(scale, said):
    with pytest.raises(ValueError, match=said):
        schemes.check_scale("weight_scale", scale, (256, 384), BLOCK)
    schemes.check_scale("weight_scale", torch.ones(2, 3), (256, 384), BLOCK)
    schemes.check_scale("weight_scale", -torch.ones(2, 3), (256, 384), BLOCK)


def test_a_wrong_scale_of_an_expert_is_named():
    scales = torch.ones(4, 2, 3)
    schemes.check_scale("w2_weight_scale", scales, (4, 256, 384), BLOCK)
    scales[2, 1, 1] = torch.nan
    with pytest.raises(ValueError, match=r"w2_weight_scale holds NaN, .* for expert 2: the checkpoint"):
        schemes.check_scale("w2_weight_scale", scales, (4, 256, 384), BLOCK)
    with pytest.raises(ValueError, match=r"w2_weight_scale is \[3, 2, 3\]; .* needs \[4, 2, 3\]"):
        schemes.check_scale("w2_weight_scale", scales[:3], (4, 256, 384), BLOCK)


def test_mxfp4_is_two_values_a_byte_with_powers_of_two_for_scales():
    """By the definition of the format, and by `transformers`."""
    packed = torch.tensor([[0x2B, 0x7F, *range(14)], [0x90, 0xE4, *range(240, 254)]], dtype=torch.uint8)
    scale = torch.tensor([[128], [120]], dtype=torch.uint8)
    found = schemes.dequantise(packed, scale, torch.float32)
    assert (found[0, :4] / 2).tolist() == [-1.5, 1, -6, 6] and (found[1, :4] * 128).tolist() == [0, -0.5, 2, -4]
    theirs = convert_moe_packed_tensors(packed[None, :, None], scale[None], dtype=torch.float32)
    assert torch.equal(found, theirs[0].T)
    extremes = schemes.dequantise(packed[:1, :16].repeat(3, 1), torch.tensor([[0], [254], [255]]).byte(), torch.float64)
    assert extremes[0, 1] == 2.0**-127 and extremes[1, 1] == 2.0**127 and extremes[2].isnan().all()


@pytest.mark.parametrize("shape", [(3, 5, 96), (4, 32)])
def test_values_are_rounded_to_the_nearest_of_mxfp4(shape):
    values = _samples.normal(shape, torch.float32, "cpu", RNG) * 4
    values[-1, :32] = 0
    packed, scale = schemes.stored_mxfp4(values)
    assert schemes.quantised(packed[0], scale[0]) == MXFP4 if len(shape) > 2 else schemes.is_mxfp4(packed, scale)
    stands_for = schemes.dequantise(packed, scale, torch.float32)
    steps = 2.0 ** (scale.float() - 127).repeat_interleave(32, -1)
    grid = torch.tensor([sign * magnitude for magnitude in schemes.E2M1 for sign in (1, -1)])
    nearest = (values.unsqueeze(-1) - steps.unsqueeze(-1) * grid).abs().min(-1).values
    assert torch.equal((values - stands_for).abs(), nearest)
    largest, step = values.abs().unflatten(-1, (-1, 32)).amax(-1), 2.0 ** (scale.float() - 127)
    assert (largest <= 6 * step).all() and ((largest > 3 * step) | (largest == 0)).all(), "the smallest scale that fits"


@pytest.mark.parametrize("scale", [(4, 1), (4, 4), (3, 2), (1, 1)])
def test_mxfp4_has_a_scale_for_32_values(scale):
    with pytest.raises(ValueError, match="a scale for each 32 values"):
        schemes.quantised(torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(scale, dtype=torch.uint8))


def test_schemes_are_printed_in_words():
    assert str(Scheme()) == "none"
    assert str(Scheme(Quantised(FP8, PER_ROW))) == "float8_e4m3fn per row by activations as they are"
    both = Scheme(Quantised(FP8, BLOCK), Quantised(FP8, GroupShape(1, 128)))
    assert str(both) == "float8_e4m3fn 128x128 by float8_e4m3fn 1x128"
    assert len({both, Scheme(Quantised(FP8, BLOCK), Quantised(FP8, GroupShape(1, 128)))}) == 1


@pytest.mark.parametrize("zero_points", [False, True])
def test_values_of_four_bits_are_where_the_layout_says(zero_points):
    """Compared with one value at a time."""
    values = torch.randint(0, 16, (3, 96), generator=RNG)
    scale = torch.rand(3, 3, generator=RNG)
    zeros = torch.tensor([[0, 15, 7]] * 3, dtype=torch.uint8) if zero_points else None
    packed = schemes.packed(values, UINT4)
    assert torch.equal(schemes.unpacked(packed, UINT4), values)
    stands_for = schemes.dequantise(packed, scale, torch.float64, zeros)
    for row in range(3):
        for column in range(96):
            byte = int(packed[row, column // 32 * 16 + column % 16])
            value = byte >> 4 if column % 32 >= 16 else byte & 15
            zero = int(zeros[row, column // 32]) if zero_points else 8
            assert stands_for[row, column] == (value - zero) * scale[row, column // 32].double()
    with pytest.raises(ValueError, match="a multiple of 32 columns, not 80"):
        schemes.packed(values[:, :80], UINT4)
