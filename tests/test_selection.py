"""The choice of kernels, overrides by users, and the messages for wrong overrides."""

import sys

import pytest
import torch

from vllm_opset import devices, ops, selection
from vllm_opset import kernel as registry
from vllm_opset.kernel import PROVIDERS, Kernel, kernels_of
from vllm_opset.kernels import cpp
from vllm_opset.ops.contract import Problem
from vllm_opset.ops.norm.layer_norm import LayerNormProblem
from vllm_opset.selection import OverrideError, choices, configure, select

NORM = LayerNormProblem("cpu", torch.float32, 64, torch.float32)
ACTIVATION = Problem("cpu", torch.float32)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """No overrides, no choices, and a registry that forgets the kernels that a test adds."""
    kernels_of("layer_norm")
    monkeypatch.setattr(registry, "_registry", {op: dict(known) for op, known in registry._registry.items()})
    monkeypatch.setattr(selection, "_overrides", None)
    monkeypatch.setattr(selection, "_choices", {})
    for name in ("OPSET_KERNELS", "OPSET_CONFIG", "OPSET_IMPORT", "OPSET_COUNT_CALLS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def override(monkeypatch, tmp_path):
    """Sets an override through one of the three sources: `override(source, {"layer_norm": "reference"})`."""

    def override(source: str, kernels: dict[str, str], key: str = "kernels") -> dict:
        if source == "OPSET_KERNELS":
            monkeypatch.setenv("OPSET_KERNELS", ",".join(f"{op}={name}" for op, name in kernels.items()))
        if source == "OPSET_CONFIG":
            path = tmp_path / "opset.yaml"
            path.write_text(f"{key}:\n" + "".join(f"  {op}: {name}\n" for op, name in kernels.items()))
            monkeypatch.setenv("OPSET_CONFIG", str(path))
        return {"opset": {key: kernels}} if source == "--additional-config" else {}

    return override


SOURCES = pytest.mark.parametrize("source", ["OPSET_KERNELS", "OPSET_CONFIG", "--additional-config"])


def add_kernel(
    op: str = "layer_norm", name: str = "mine", provider="tests", devices=(), refuses=None, run=None
) -> Kernel:
    new = Kernel(op, name, provider, devices, lambda problem: refuses, run or ops.BY_NAME[op].reference)
    registry._registry[op][name] = new
    return new


# Choices.


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


# Overrides by users.


@SOURCES
def test_an_override_is_obeyed_and_named_as_the_reason(source, override):
    configure(override(source, {"layer_norm": "reference"}))
    choice = select(ops.layer_norm, NORM)
    assert choice.kernel.name == "reference"
    assert choice.reason.startswith(f"asked for by {source}")
    assert select(ops.gelu_new, ACTIVATION).kernel.name == "cpu"


def test_the_most_specific_source_counts(override):
    for name in ("one", "two", "three"):
        add_kernel(name=name)
    override("OPSET_KERNELS", {"layer_norm": "one", "gelu_new": "reference"})
    assert select(ops.layer_norm, NORM).kernel.name == "one"
    override("OPSET_CONFIG", {"layer_norm": "two"})
    configure()
    assert select(ops.layer_norm, NORM).kernel.name == "two"
    configure(override("--additional-config", {"layer_norm": "three"}))
    assert select(ops.layer_norm, NORM).kernel.name == "three"
    assert select(ops.gelu_new, ACTIVATION).kernel.name == "reference", "a source overrides ops, not whole sources"


def test_spaces_and_empty_words_do_not_matter(monkeypatch):
    monkeypatch.setenv("OPSET_KERNELS", " layer_norm = reference ,, gelu_new=reference,")
    assert {op: override.kernel for op, override in configure().items()} == {
        "layer_norm": "reference",
        "gelu_new": "reference",
    }


def test_an_empty_file_says_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("OPSET_CONFIG", str(tmp_path / "empty.yaml"))
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert configure() == {}


def test_other_users_of_additional_config_are_left_alone():
    assert configure({"somebody else": {"layer_norm": "theirs"}}) == {}


# Messages to users.


@SOURCES
def test_an_unknown_op_is_an_error_that_names_the_nearest(source, override):
    with pytest.raises(OverrideError, match=f"{source}.*unknown op 'rms_nrom'; did you mean 'rms_norm'?"):
        configure(override(source, {"rms_nrom": "reference"}))


@SOURCES
def test_an_unknown_kernel_is_an_error_that_names_the_nearest(source, override):
    with pytest.raises(
        OverrideError, match=f"{source}.*layer_norm has no kernel 'refrence' here; did you mean 'reference'?"
    ):
        configure(override(source, {"layer_norm": "refrence"}))


@pytest.mark.parametrize("source", ["OPSET_CONFIG", "--additional-config"])
def test_an_unknown_key_is_an_error_that_names_the_nearest(source, override):
    with pytest.raises(OverrideError, match=f"{source}.*unknown key 'kernel'; did you mean 'kernels'?"):
        configure(override(source, {"layer_norm": "reference"}, key="kernel"))


def test_a_name_like_no_other_is_answered_with_all():
    with pytest.raises(OverrideError, match="has no kernel 'xyzzy' here; known: cpu, reference"):
        configure({"opset": {"kernels": {"gelu_new": "xyzzy"}}} | {})


def test_a_kernel_that_cannot_run_here_is_not_suggested(monkeypatch):
    add_kernel(name="tritone", devices=("cuda",))
    monkeypatch.setattr(devices, "here", lambda: ["cpu"])
    with pytest.raises(OverrideError, match=r"no kernel 'tritn' here; known: cpu, reference$"):
        configure({"opset": {"kernels": {"layer_norm": "tritn"}}})
    monkeypatch.setattr(devices, "here", lambda: ["cpu", "cuda"])
    with pytest.raises(OverrideError, match="did you mean 'triton"):
        configure({"opset": {"kernels": {"layer_norm": "tritn"}}})


@pytest.mark.parametrize("additional", [{"opsett": {}}, {"kernels": {"layer_norm": "reference"}}], ids=str)
def test_configuring_checks_every_setting(additional, monkeypatch):
    with pytest.raises(OverrideError, match="--additional-config"):
        configure(additional)
    monkeypatch.setenv("OPSET_KERNEL", "layer_norm=reference")
    with pytest.raises(OverrideError, match="OPSET_KERNEL is no variable"):
        configure()


def test_a_word_that_is_no_pair_is_an_error(monkeypatch):
    monkeypatch.setenv("OPSET_KERNELS", "layer_norm")
    with pytest.raises(OverrideError, match="OPSET_KERNELS: 'layer_norm' is not of the form op=kernel"):
        configure()


@pytest.mark.parametrize(
    "config", ["reference", ["layer_norm"], {"kernels": "reference"}, {"kernels": ["layer_norm"]}], ids=str
)
def test_a_config_of_another_shape_is_an_error(config):
    with pytest.raises(OverrideError, match=r"--additional-config.*expected keys with values, not"):
        configure({"opset": config})


@pytest.mark.parametrize("value", [True, 3, None, ["reference"]], ids=str)
def test_a_kernel_that_is_no_name_is_an_error(value):
    with pytest.raises(OverrideError, match="layer_norm has no kernel"):
        configure({"opset": {"kernels": {"layer_norm": value}}})


def test_a_file_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setenv("OPSET_CONFIG", "/nowhere/opset.yaml")
    with pytest.raises(OverrideError, match=r"OPSET_CONFIG: cannot read /nowhere/opset\.yaml: .*No such file"):
        configure()


def test_a_file_that_is_no_yaml_is_an_error(monkeypatch, tmp_path):
    (tmp_path / "opset.yaml").write_text("kernels: {layer_norm: [")
    monkeypatch.setenv("OPSET_CONFIG", str(tmp_path / "opset.yaml"))
    with pytest.raises(OverrideError, match=r"(?s)OPSET_CONFIG: cannot read .*opset\.yaml: .*line 1"):
        configure()


def test_a_kernel_that_cannot_do_it_is_refused_with_its_reason_and_those_that_can():
    add_kernel(refuses="only 128 columns")
    configure({"opset": {"kernels": {"layer_norm": "mine"}}})
    with pytest.raises(OverrideError) as error:
        select(ops.layer_norm, NORM)
    assert str(error.value) == (
        "--additional-config asks for layer_norm=mine, which cannot do it: only 128 columns "
        "(device=cpu, dtype=float32, hidden_size=64, weight_dtype=float32). "
        "Remove that override, or name a kernel that can: cpu, reference"
    )


def test_a_kernel_of_another_device_is_refused():
    add_kernel(devices=("cuda",))
    configure({"opset": {"kernels": {"layer_norm": "mine"}}})
    with pytest.raises(OverrideError, match="it runs on cuda, not on cpu"):
        select(ops.layer_norm, NORM)


def test_a_provider_that_cannot_be_had_is_named_with_its_cure(monkeypatch):
    assert "triton" in PROVIDERS
    from vllm_opset.kernels import triton

    monkeypatch.setattr(triton, "unavailable", lambda: "Triton is not installed: pip install triton")
    registry._registry["layer_norm"].pop("triton", None)
    with pytest.raises(OverrideError, match="no kernel 'triton' here; Triton is not installed: pip install triton"):
        configure({"opset": {"kernels": {"layer_norm": "triton"}}})


# The user's own modules.


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Makes an importable module of this text."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return make


def test_a_users_module_is_imported_before_its_kernels_are_named(module, monkeypatch):
    text = "from vllm_opset import kernel, ops\n\n@kernel.kernel(ops.relu2, name='mine')\ndef relu2(x): ...\n"
    module("users_kernels", text)
    monkeypatch.setenv("OPSET_IMPORT", " users_kernels, ")
    monkeypatch.setenv("OPSET_KERNELS", "relu2=mine")
    choice = select(ops.relu2, ACTIVATION)
    assert (choice.kernel.name, choice.kernel.provider) == ("mine", "users_kernels")


def test_a_users_module_that_is_not_there_is_an_error_with_the_cure(monkeypatch):
    monkeypatch.setenv("OPSET_IMPORT", "no_such_module")
    with pytest.raises(OverrideError, match=r"importing 'no_such_module' raised ModuleNotFoundError: .* PYTHONPATH"):
        configure()


def test_a_users_module_that_fails_is_an_error_that_names_it(module, monkeypatch):
    module("failing_kernels", "1 / 0")
    monkeypatch.setenv("OPSET_IMPORT", "failing_kernels")
    with pytest.raises(
        OverrideError, match="importing 'failing_kernels' raised ZeroDivisionError: division by zero"
    ) as error:
        configure()
    assert isinstance(error.value.__cause__, ZeroDivisionError)


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
