"""The choice of kernels: which one serves, why the others do not, and the choices as data."""

import pytest
import torch
from added_kernels import ACTIVATION, NORM, add_kernel, clean  # noqa: F401

from vllm_opset import ops, selection
from vllm_opset.kernel import kernels_of
from vllm_opset.kernels import cpp
from vllm_opset.ops.contract import Problem
from vllm_opset.ops.norm.layer_norm import LayerNormProblem
from vllm_opset.selection import choices, configure, select


def test_the_devices_own_kernel_is_preferred():
    choice = select(ops.layer_norm, NORM)
    assert (choice.kernel.name, choice.reason) == ("cpu", "first kernel for cpu that supports it")
    assert choice.run.__wrapped__ is choice.kernel.run


def test_an_op_without_a_kernel_for_the_device_has_its_reference():
    choice = select(ops.relu2, ACTIVATION)
    assert (choice.kernel.name, choice.reason) == ("reference", "no other kernel for cpu supports it")


def test_on_an_unknown_device_the_reference_runs():
    assert select(ops.layer_norm, LayerNormProblem("xpu", torch.float32, 64, None)).kernel.name == "reference"


def test_a_kernel_that_cannot_is_passed_over_with_its_reason():
    add_kernel("relu2", "half", provider="cpu", refuses="only fp16")
    choice = select(ops.relu2, ACTIVATION)
    assert choice.kernel.name == "reference"
    assert ("half", "only fp16") in choice.rejected


def test_a_users_kernel_waits_to_be_named():
    add_kernel()
    assert select(ops.layer_norm, NORM).kernel.name == "cpu"


def test_every_other_kernel_for_the_device_has_its_reason():
    add_kernel("relu2", "half", provider="cpu", refuses="only fp16")
    add_kernel("relu2", "elsewhere", provider="triton", devices=("cuda",))
    add_kernel("relu2", "first", provider="cpu")
    add_kernel("relu2", "mine")
    reasons = dict(select(ops.relu2, ACTIVATION).rejected)
    assert set(reasons) == set(kernels_of("relu2", device="cpu")) - {"first"}
    assert "elsewhere" not in reasons
    assert reasons["half"] == "only fp16"
    assert reasons["mine"] == "it runs where an override names it"
    assert reasons["reference"] == "first comes first"


def test_with_an_override_every_other_kernel_has_its_reason():
    configure({"opset": {"kernels": {"relu2": "reference"}}})
    add_kernel("relu2", "mine")
    reasons = dict(select(ops.relu2, ACTIVATION).rejected)
    assert reasons["mine"] == "--additional-config asks for reference"


def test_a_choice_does_not_ask_for_what_other_devices_need(monkeypatch):
    """Finding out whether there are C++ kernels for a CPU would build them."""
    asked = []
    monkeypatch.setattr(cpp, "unavailable", lambda: asked.append("cpp"))
    select(ops.relu2, Problem("cuda", torch.float32))
    selection.why_no_kernel(ops.relu2, Problem("cuda", torch.float32))
    assert not asked
    select(ops.relu2, ACTIVATION)
    assert asked


def test_why_no_kernel_is_the_reason_of_the_one_that_refuses():
    add_kernel("relu2", "half", provider="cpu", refuses="only fp16")
    add_kernel("relu2", "quarter", provider="cpu", refuses="only fp8")
    assert selection.why_no_kernel(ops.relu2, ACTIVATION) == "only fp16"
    assert choices() == []


def test_why_no_kernel_is_nothing_where_one_can():
    add_kernel("relu2", "half", provider="cpu", refuses="only fp16")
    add_kernel("relu2", "able", provider="cpu")
    assert selection.why_no_kernel(ops.relu2, ACTIVATION) is None
    assert choices() == []


@pytest.mark.parametrize("device", ["cpu", "xpu"])
def test_why_no_kernel_names_a_device_that_has_none(device):
    add_kernel("relu2", "mine")  # it serves only if it is named
    add_kernel("relu2", "elsewhere", provider="cpu", devices=("cuda",))
    problem = Problem(device, torch.float32)
    assert selection.why_no_kernel(ops.relu2, problem) == f"there is no kernel for {device} here"


def test_a_choice_is_made_once():
    choice = select(ops.layer_norm, NORM)
    assert select(ops.layer_norm, LayerNormProblem("cpu", torch.float32, 64, torch.float32)) is choice
    assert select(ops.layer_norm, LayerNormProblem("cpu", torch.float32, 65, torch.float32)) is not choice


def test_a_chosen_kernel_that_fails_raises():
    def run(*args, **kwargs):
        raise RuntimeError("out of shared memory")

    add_kernel("relu2", "failing", provider="cpu", run=run)
    with pytest.raises(RuntimeError, match="out of shared memory"):
        select(ops.relu2, ACTIVATION).run(torch.ones(1))


# The choices as data.


def test_choices_are_listed_in_the_order_of_the_ops():
    for op, problem in ((ops.relu2, ACTIVATION), (ops.gelu_new, ACTIVATION), (ops.layer_norm, NORM)):
        select(op, problem)
    assert [choice.op for choice in choices()] == ["gelu_new", "relu2", "layer_norm"]


def test_only_other_overrides_make_configuring_forget_earlier_choices():
    choice = select(ops.layer_norm, NORM)
    configure()
    assert choices() == [choice]
    configure({"opset": {"kernels": {"layer_norm": "reference"}}})
    assert choices() == []


def test_the_next_engine_of_a_process_leaves_the_choices_of_the_first(monkeypatch):
    monkeypatch.setenv("OPSET_COUNT_CALLS", "1")
    first = selection.forget()
    configure({"opset": {"kernels": {"relu2": "reference"}}})
    first = selection.forget()  # a worker does this after its configuration
    mine = select(ops.relu2, ACTIVATION)
    add_kernel("relu2", "second", provider="cpu")
    configure({"opset": {"kernels": {"relu2": "second"}}})
    second = selection.forget()
    theirs = select(ops.relu2, ACTIVATION)
    mine.run(torch.ones(1))
    assert (mine.kernel.name, theirs.kernel.name) == ("reference", "second")
    assert choices(first) == [mine] and choices(second) == choices() == [theirs]
    assert [choice.calls.total() for choice in choices(first)] == [1]


def test_calls_are_counted_on_request(monkeypatch):
    monkeypatch.setenv("OPSET_COUNT_CALLS", "1")
    choice = select(ops.relu2, ACTIVATION)
    for _ in range(3):
        assert torch.equal(choice.run(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 4.0]))
    assert choice.calls == {None: 3}  # the reference has no variants


def test_calls_are_not_counted_otherwise():
    choice = select(ops.relu2, ACTIVATION)
    choice.run(torch.ones(1))
    assert not choice.calls and choice.run.__wrapped__ is ops.relu2.reference
