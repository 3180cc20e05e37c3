"""Errors name a quantised tensor that does not fit or is missing, and a watched layer is freed with its model."""

import gc
import re
import weakref
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.platforms import current_platform

from vllm_opset.model.int4_experts import OpsetGptqExpertsMethod
from vllm_opset.model.loading import (
    check_blocks,
    check_blocks_of_experts,
    check_experts,
    check_groups,
    check_linear,
    watch,
)
from vllm_opset.platform.quantised_loading import keep_int8_scales_of_parts
from vllm_opset.unsupported import Refusal

HERE = f"^vllm-opset {re.escape(current_platform.where)} does not support"
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
        first = 2 * loaded_shard_id if isinstance(loaded_shard_id, int) else 0
        self.copy(param.data[first:], loaded_weight)

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


def load(layer: torch.nn.Module, *shards, lacks: str | None = None) -> None:
    """Load the parts of all parameters, but of one only the first of them."""
    for name, parameter in layer.named_parameters():
        for shard in shards[:1] if name == lacks else shards:
            parameter.weight_loader(parameter, torch.ones(2, parameter.shape[1]), shard)


@pytest.mark.parametrize("name", ["weight", "weight_scale"])
def test_each_time_that_weights_are_loaded_a_part_that_is_missing_is_named(name):
    layer = Linear()
    missing = rf"layers\.0\.gate_up_proj\.{name} \(1\) is missing in the checkpoint"
    load(layer, 0, 1, lacks=name)
    with pytest.raises(ValueError, match=missing):
        check_linear(layer)
    load(layer, 0, 1)
    check_linear(layer)
    load(layer, 0, 1, lacks=name)
    with pytest.raises(ValueError, match=missing):
        check_linear(layer)


@pytest.mark.parametrize("name", ["weight", "weight_scale"])
def test_a_whole_tensor_that_is_missing_is_named(name):
    layer = Linear(1)
    others = [one for own, one in layer.named_parameters() if own != name]
    others[0].weight_loader(others[0], torch.ones(2, others[0].shape[1]), 0)
    with pytest.raises(ValueError, match=rf"layers\.0\.gate_up_proj\.{name} is missing in the checkpoint"):
        check_linear(layer)


@pytest.mark.parametrize("shards", [(None,), ((0, 1), 2), (0, (1, 2))], ids=str)
def test_a_tensor_may_be_fused_on_disk_as_a_whole_or_in_part(shards):
    layer = Linear(3)
    load(layer, *shards)
    check_linear(layer)


def test_a_part_beside_a_fused_one_that_is_missing_is_named():
    layer = Linear(3)
    load(layer, (0, 1), 2, lacks="weight")
    with pytest.raises(ValueError, match=r"gate_up_proj\.weight \(2\) is missing"):
        check_linear(layer)


def test_a_layer_for_which_no_loader_was_called_is_not_checked():
    layer = Linear()
    check_linear(layer)
    assert layer.weight_scale.isnan().all(), "which the kernel names if nothing else has filled it"


def test_the_scale_of_int8_activations_is_kept_for_each_part(monkeypatch):
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_w8a8_int8 as int8

    of_vllm = int8.CompressedTensorsW8A8Int8
    monkeypatch.setattr(of_vllm, "create_weights", of_vllm.create_weights)  # which is set back afterwards
    monkeypatch.setattr(int8, "init_int8_linear_kernel", lambda **how: None)
    monkeypatch.setattr("vllm.model_executor.parameter.get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr("vllm.model_executor.parameter.get_tensor_model_parallel_world_size", lambda: 1)
    keep_int8_scales_of_parts()
    layer, sizes = torch.nn.Module(), {"output_partition_sizes": [2, 2], "input_size_per_partition": 4}
    loader = Mock()
    of_vllm("tensor", True, True).create_weights(layer, **sizes, params_dtype=torch.float32, weight_loader=loader)
    for shard, scale in enumerate((0.5, 0.25)):
        layer.input_scale.load_merged_column_weight(loaded_weight=torch.tensor([scale]), shard_id=shard)
    assert layer.input_scale.tolist() == [0.5, 0.25] and layer.input_scale.weight_loader is loader


class Experts(torch.nn.Module):
    """Four experts, of which this worker has those that are mapped to one of its rows."""

    local_num_experts, moe_config = 4, SimpleNamespace(is_act_and_mul=True)

    def __init__(self, expert_map: list[int] | None = None) -> None:
        super().__init__()
        self.layer_name = "layers.0.experts"
        self.expert_map = None if expert_map is None else torch.tensor(expert_map)
        for name in ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"):
            parameter = torch.nn.Parameter(torch.zeros(4, 2, 4), requires_grad=False)
            parameter.weight_loader = self.load
            self.register_parameter(name, parameter)
        watch(self)

    def load(self, param, loaded_weight, weight_name: str, shard_id: str, expert_id: int, return_success=False) -> bool:
        return self.expert_map is None or bool(self.expert_map[expert_id] >= 0)

    def load_all(self, experts: range, lacks: tuple[str, str, int] | None = None, dimensions: int = 2) -> None:
        for name, parameter in self.named_parameters():
            for shard in ("w1", "w3") if name.startswith("w13") else ("w2",):
                for expert in experts:
                    if (name, shard, expert) != lacks:
                        loaded = torch.ones((2,) * dimensions)
                        parameter.weight_loader(parameter, loaded, name, shard_id=shard, expert_id=expert)


@pytest.mark.parametrize("lacks", [("w13_weight", "w3", 2), ("w2_weight_scale", "w2", 3)], ids=str)
def test_a_tensor_of_an_expert_that_is_missing_is_named_each_time(lacks):
    layer, (name, shard, expert) = Experts(), lacks
    layer.load_all(range(4))
    check_experts(layer)
    layer.load_all(range(4), lacks)
    with pytest.raises(ValueError, match=rf"layers\.0\.experts\.{name} \({shard} of expert {expert}\) is missing"):
        check_experts(layer)


def test_experts_of_other_workers_may_be_missing():
    layer = Experts([-1, 0, -1, 1])
    layer.load_all(range(4), ("w2_weight", "w2", 2))
    check_experts(layer)
    layer.load_all(range(4), ("w2_weight", "w2", 3))
    with pytest.raises(ValueError, match=r"w2_weight \(w2 of expert 3\) is missing"):
        check_experts(layer)


def test_one_tensor_of_three_dimensions_holds_all_experts():
    layer = Experts()
    layer.load_all(range(1), dimensions=3)
    check_experts(layer)
    layer.load_all(range(1), ("w13_weight_scale", "w3", 0), dimensions=3)
    with pytest.raises(ValueError, match=r"w13_weight_scale \(w3 of expert 0, .*w3 of expert 3\) is missing"):
        check_experts(layer)


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
    with pytest.raises(Refusal, match=f"{HERE} {said}"):
        check_blocks(LAYER, (128, 64), widths, out_features)


FEWER_WORKERS, OTHER_WEIGHTS = "give a smaller --tensor-parallel-size, or", "choose another checkpoint"


@pytest.mark.parametrize(
    ("block", "is_split", "width", "hidden_size", "workers"),
    [
        ((128, 128), False, 256, 192, 1),
        ((128, 128), False, 256, 192, 2),
        ((64, 128), False, 192, 128, 1),
        ((128, 128), True, 96, 256, 4),
    ],
)
def test_blocks_of_experts_that_vllm_loads_are_not_refused(block, is_split, width, hidden_size, workers):
    check_blocks_of_experts(LAYER, block, is_split, width, hidden_size, workers)


@pytest.mark.parametrize(
    ("block", "is_split", "width", "hidden_size", "workers", "columns", "cure"),
    [
        ((128, 128), False, 192, 256, 1, 192, OTHER_WEIGHTS),
        ((128, 128), False, 192, 256, 2, 192, FEWER_WORKERS),  # as vLLM 0.26 to 0.28 do not split blocks
        ((64, 128), False, 192, 256, 2, 192, FEWER_WORKERS),
        ((128, 128), True, 192, 256, 1, 192, OTHER_WEIGHTS),
        ((128, 128), True, 96, 256, 2, 192, OTHER_WEIGHTS),
        ((128, 128), True, 64, 192, 2, 64, FEWER_WORKERS),
    ],
)
def test_blocks_of_experts_that_vllm_does_not_load_are_refused(
    block, is_split, width, hidden_size, workers, columns, cure
):
    said = rf"with {columns} columns in layers\.0\.gate_up_proj, which are no multiple of 128: {cure}"
    with pytest.raises(Refusal, match=f"{HERE} fp8 experts by blocks of .* {said}"):
        check_blocks_of_experts(LAYER, block, is_split, width, hidden_size, workers)


@pytest.mark.parametrize(("group_size", "columns", "all_columns"), [(-1, 96, 192), (64, 128, 128), (64, 64, 128)])
def test_whole_groups_of_int4_weights_are_not_refused(group_size, columns, all_columns):
    check_groups(LAYER, group_size, columns, all_columns)


@pytest.mark.parametrize(
    ("group_size", "columns", "all_columns", "said"),
    [
        (-1, 208, 208, "208 columns in .*, which are no multiple of 32: choose another checkpoint"),
        (-1, 48, 96, r"48 columns in .*, which are no multiple of 32: give a smaller --tensor-parallel-size\."),
        (128, 192, 384, r"192 columns in .*, which are no multiple of 128: give a smaller --tensor-parallel-size\."),
        (128, 192, 192, "192 columns in .*, which are no multiple of 128: choose another checkpoint"),
    ],
)
def test_incomplete_groups_of_int4_weights_are_refused(group_size, columns, all_columns, said):
    with pytest.raises(Refusal, match=f"{HERE} int4 weights with {said}"):
        check_groups(LAYER, group_size, columns, all_columns)


def test_int4_experts_with_biases_of_the_model_are_refused():
    method, layer = object.__new__(OpsetGptqExpertsMethod), SimpleNamespace(layer_name="layers.0.experts")
    method.moe = SimpleNamespace(has_bias=True)
    with pytest.raises(Refusal, match=rf"{HERE} int4 experts with biases in layers\.0\.experts: choose another model"):
        method.create_weights(layer, 4, 64, 64, torch.float32)
