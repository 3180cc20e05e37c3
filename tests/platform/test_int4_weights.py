"""The quantization_config of a checkpoint says whether its int4 weights are served. What is not served is named."""

import pytest

from vllm_opset.platform import int4_weights

AWQ = {"bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"bits": 4, "group_size": 128, "desc_act": False, "sym": True}
COMPRESSED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"group_size": -1}, None),
        ({"bits": 8}, "8-bit AWQ"),
        ({"group_size": 16}, "AWQ groups of 16"),
        ({"group_size": 96}, "AWQ groups of 96"),
        ({"zero_point": False}, "AWQ without zero points"),
        ({"version": "gemv"}, "AWQ's layout gemv"),
        ({"lm_head": True}, "an AWQ language model head"),
        ({"bits": None}, "AWQ whose quantization_config is not in config.json"),
    ],
)
def test_awq(changes, said):
    assert [*int4_weights.unserved_by_awq(AWQ | changes)] == ([] if said is None else [said])


def test_the_older_names_of_awq_are_read():
    assert not [*int4_weights.unserved_by_awq({"w_bit": 4, "q_group_size": 64, "zero_point": True})]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"desc_act": True, "group_size": -1}, None),  # the order of one group changes nothing
        ({"dynamic": {"-:.*down.*": {}}}, None),
        ({"dynamic": {"+:.*down.*": {"group_size": 32}}}, None),
        ({"bits": 8}, "8-bit GPTQ"),
        ({"desc_act": True}, "GPTQ's activation ordering by groups (act-order; static ordering is served)"),
        ({"sym": False}, "GPTQ with zero points (asymmetric weights)"),
        ({"dynamic": {"+:.*down.*": {"sym": False}}}, "GPTQ with zero points (asymmetric weights)"),
        ({"checkpoint_format": "marlin"}, "GPTQ's layout marlin"),
        ({"lm_head": True}, "a GPTQ language model head"),
        ({"dynamic": {"+:.*down.*": {"bits": 8}}}, "8-bit GPTQ"),
    ],
)
def test_gptq(changes, said):
    assert [*int4_weights.unserved_by_gptq(GPTQ | changes)] == ([] if said is None else [said])


@pytest.mark.parametrize(
    ("changes", "of_group", "said"),
    [
        ({}, {}, None),
        ({"actorder": "weight", "symmetric": False}, {}, None),
        ({"strategy": "channel", "group_size": None}, {}, None),
        ({"group_size": 16}, {}, "int4 weights in groups of 16"),
        ({"actorder": "group"}, {}, "int4 weights with activation ordering by groups"),
        ({}, {"format": "int-quantized"}, "int4 weights in the layout int-quantized"),
        ({}, {"input_activations": {"num_bits": 8}}, "int4 weights for quantised activations"),
        ({}, {"output_activations": {"num_bits": 8}}, "int4 weights for quantised activations"),
    ],
)
def test_compressed_tensors(changes, of_group, said):
    assert int4_weights.is_int4(COMPRESSED | changes)
    group = {"weights": COMPRESSED | changes} | of_group
    found = [*int4_weights.unserved_by_compressed_tensors(group, "pack-quantized")]
    assert not found if said is None else found[0].startswith(said)
