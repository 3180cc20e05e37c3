"""Every contract is complete, and its parts agree with each other."""

import inspect

import pytest
import torch

from vllm_opset import ops
from vllm_opset.ops.contract import Cost, Problem, accumulator, op

ALL_OPS = pytest.mark.parametrize("contract", ops.ALL, ids=lambda contract: contract.name)


def tensors_of(args: tuple, kwargs: dict) -> list[torch.Tensor]:
    return [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, which distinguish one NaN from another, in any dtype."""
    return tensor.contiguous().view(-1).view(torch.uint8)


@ALL_OPS
def test_an_op_lives_in_the_file_of_its_name_and_is_documented(contract):
    room, _, module = contract.reference.__module__.rpartition(".")
    assert module == contract.name and room.startswith("vllm_opset.ops.")
    assert len(inspect.getdoc(contract).splitlines()) > 2


@ALL_OPS
def test_samples_are_named_reproducible_and_fresh(contract):
    for dtype in contract.dtypes:
        samples = list(contract.samples("cpu", dtype))
        assert len({sample.name for sample in samples}) == len(samples)
        for sample in samples:
            first, second = (tensors_of(*sample.make()) for _ in range(2))
            assert first
            for one, other in zip(first, second, strict=True):
                assert torch.equal(bits(one), bits(other)), f"{sample} is not reproducible"
                assert one.numel() == 0 or one.data_ptr() != other.data_ptr(), f"{sample} gives one tensor twice"


@ALL_OPS
def test_samples_hold_the_empty_edge_and_both_signs(contract):
    samples = list(contract.samples("cpu", contract.dtypes[0]))
    assert any(sample.name.startswith("zero ") for sample in samples)
    floats = [tensor for sample in samples for tensor in tensors_of(*sample.make()) if tensor.is_floating_point()]
    if contract.dtypes[0].is_floating_point:
        assert any((tensor < 0).any() for tensor in floats) and any((tensor > 0).any() for tensor in floats)


@ALL_OPS
def test_a_problem_is_hashable_printable_and_reproducible(contract):
    for sample in contract.samples("cpu", contract.dtypes[0]):
        problem, again = (contract.problem_for(*args, **kwargs) for args, kwargs in (sample.make(), sample.make()))
        assert type(problem) is contract.problem and isinstance(problem, Problem)
        assert problem.device == "cpu" and "torch." not in str(problem)
        assert len({problem, again}) == 1


@ALL_OPS
def test_cost_counts_at_least_what_must_be_written(contract):
    args, kwargs = next(iter(contract.bench_samples("cpu", contract.dtypes[0]))).make()
    cost = contract.cost_of(*args, **kwargs)
    assert isinstance(cost, Cost) and isinstance(cost.bytes, int) and isinstance(cost.flops, int)
    assert cost.flops >= 0
    returned = contract(*args, **kwargs)
    returned = returned if isinstance(returned, tuple) else (returned,)
    assert cost.bytes >= sum(value.nbytes for value in returned if isinstance(value, torch.Tensor))


def test_an_op_may_not_mutate_what_it_does_not_take():
    with pytest.raises(ValueError, match="declares \\['y'\\], which it does not take"):

        @op(mutates=("y",))
        def double(x):
            """Twice x."""


def test_the_accumulator_is_fp32_or_wider():
    half, single, double = (torch.empty(1, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64))
    assert accumulator(half) is torch.float32
    assert accumulator(half, single) is torch.float32
    assert accumulator(half, double) is torch.float64


@ALL_OPS
def test_the_reference_refuses_illegal_inputs_with_a_reason(contract):
    """Parity shows this reason to the author of a kernel that accepts such inputs."""
    for dtype in contract.dtypes:
        for sample in contract.illegal_samples("cpu", dtype):
            args, kwargs = sample.make()
            with pytest.raises(ValueError, match=r"\w \w"):
                contract.reference(*args, **kwargs)
