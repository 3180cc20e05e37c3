"""The registry of kernels: which kernels are registered, under which names, and where they are found."""

import sys
from pathlib import Path

import pytest

from vllm_opset import kernel as registry
from vllm_opset import kernels, ops
from vllm_opset.kernel import PROVIDERS, REFERENCE, kernel, kernels_of, load


@pytest.fixture(autouse=True)
def registry_as_it_was(monkeypatch):
    """Restores the registry after a test."""
    kernels_of("rms_norm")  # loads the providers, whose files register only once in a process
    monkeypatch.setattr(registry, "_registry", {op: dict(known) for op, known in registry._registry.items()})


@pytest.fixture
def new_provider(tmp_path, monkeypatch):
    """Makes a provider of these files: `new_provider("name", {"rms_norm.py": "…"})`."""

    def make(name: str, files: dict[str, str], unavailable: str | None = None) -> None:
        folder = tmp_path / name
        folder.mkdir()
        head = f"DEVICES = ('cpu',)\n\ndef unavailable():\n    return {unavailable!r}\n"
        for file, text in {"__init__.py": head, **files}.items():
            Path(folder, file).write_text(text)
        monkeypatch.setattr(kernels, "__path__", [*kernels.__path__, str(tmp_path)])
        monkeypatch.setattr(registry, "PROVIDERS", (*PROVIDERS, name))

    yield make
    for module in [
        module
        for module in sys.modules
        if Path(getattr(sys.modules[module], "__file__", None) or "/").is_relative_to(tmp_path)
    ]:
        del sys.modules[module]


def test_every_op_has_its_reference_first():
    for op in ops.ALL:
        first = next(iter(kernels_of(op.name).values()))
        assert (first.name, first.provider, first.run) == (REFERENCE, REFERENCE, op.reference)


def test_the_cpu_kernels_are_found_and_know_where_they_run():
    cpu = kernels_of("rms_norm")["cpu"]
    assert (cpu.provider, cpu.devices, str(cpu)) == ("cpu", ("cpu",), "rms_norm=cpu")
    assert cpu.runs_on("cpu") and not cpu.runs_on("cuda")


def test_kernels_that_cannot_be_had_here_are_there_only_to_be_listed():
    assert registry.why_unavailable("ascend") is not None
    before = kernels_of("rms_norm")
    listed = kernels_of("rms_norm", elsewhere=True)
    assert listed["ascend"].devices == ("npu",) and listed["ascend"].provider == "ascend"
    assert kernels_of("rms_norm") == before and "ascend" not in before


def test_a_users_kernel_is_named_after_its_module_and_may_run_anywhere():
    @kernel(ops.rms_norm, name="mine", supports=lambda problem: None)
    def rms_norm(x, weight, epsilon, weight_offset=0.0):
        return x

    mine = kernels_of("rms_norm")["mine"]
    assert mine.provider == __name__ and mine.run is rms_norm
    assert mine.runs_on("cpu") and mine.runs_on("cuda")


def test_without_limits_a_kernel_supports_everything():
    kernel(ops.rms_norm, name="mine")(ops.rms_norm.reference)
    assert kernels_of("rms_norm")["mine"].supports("whatever the problem") is None


def test_supports_is_a_function_that_returns_none_or_a_reason():
    """Whoever writes True means that the kernel supports the problem, and the choice would take it as a reason."""
    with pytest.raises(ValueError, match="rms_norm=mine: supports=True is no function"):
        kernel(ops.rms_norm, name="mine", supports=True)(ops.rms_norm.reference)
    kernel(ops.rms_norm, name="mine", supports=lambda result: result)(ops.rms_norm.reference)
    for result in (True, False, ""):
        with pytest.raises(ValueError, match=f"rms_norm=mine: supports returned {result!r}. Return None, or in words"):
            kernels_of("rms_norm")["mine"].supports(result)


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_a_name_is_given_once(name):
    with pytest.raises(ValueError, match=f"rms_norm already has a kernel named '{name}', from {name}"):
        kernel(ops.rms_norm, name=name)(lambda x: x)


def test_what_is_listed_cannot_be_changed_from_outside():
    kernels_of("rms_norm").clear()
    assert REFERENCE in kernels_of("rms_norm")


def test_a_new_file_in_a_provider_is_found(new_provider):
    text = "from vllm_opset import kernel, ops\n\n@kernel.kernel(ops.relu2, name='new')\ndef relu2(x): ...\n"
    new_provider("found", {"relu2.py": text, "_shared.py": "raise AssertionError('nobody imports this')"})
    new = kernels_of("relu2")["new"]
    assert (new.provider, new.devices) == ("found", ("cpu",))


def test_a_file_named_after_no_op_is_an_error(new_provider):
    new_provider("misnamed", {"rms_nrom.py": ""})
    with pytest.raises(ImportError, match=r"kernels\.misnamed\.rms_nrom is named after no op"):
        kernels_of("rms_norm")


def test_a_file_that_fails_to_import_fails_every_time(new_provider):
    """If a partial provider loaded silently the second time, it would be a fallback that nobody asked for."""
    new_provider("failing", {"rms_norm.py": "raise RuntimeError('no such device')"})
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such device"):
            kernels_of("rms_norm")


def test_a_provider_that_cannot_be_had_says_why_and_lists_nothing(new_provider):
    new_provider("absent", {"rms_norm.py": "raise AssertionError('imported')"}, unavailable="pip install absent")
    assert load("absent") == "pip install absent"
    assert "absent" not in {known.provider for known in kernels_of("rms_norm").values()}


def test_only_what_callers_prepare_can_be_prepared():
    with pytest.raises(ValueError, match=r"callers of linear do not prepare \['wieght'\]; known: weight, weight_scale"):
        kernel(ops.linear, name="packed", prepare={"wieght": str})
    with pytest.raises(ValueError, match="callers of rms_norm do not prepare"):
        kernel(ops.rms_norm, name="packed", prepare={"weight": str})


def norm_with_an_argument_more(x, weight, epsilon, stream, weight_offset=0.0): ...
def norm_in_another_order(x, epsilon, weight, weight_offset=0.0): ...
def norm_without_an_offset(x, weight, epsilon): ...
def norm_with_another_default(x, weight, epsilon, weight_offset=1.0): ...
def norm_without_a_default(x, weight, epsilon, weight_offset): ...
def norm_by_keyword(x, weight, epsilon, *, weight_offset=0.0): ...
def norm_by_position(x, weight, epsilon, weight_offset=0.0, /): ...
def norm_of_anything(*args, **kwargs): ...
def norm_misspelt(x, wieght, epsilon, weight_offset=0.0): ...


WRONG_SIGNATURES = {
    norm_with_an_argument_more: "no call gives its parameter 'stream', which has no default",
    norm_in_another_order: "by position it takes x, epsilon, weight, weight_offset, not x, weight, epsilon, weight_off",
    norm_without_an_offset: "it has no parameter 'weight_offset'",
    norm_with_another_default: "the default of 'weight_offset' is 1.0, not 0.0",
    norm_without_a_default: "'weight_offset' has no default, where the op's is 0.0",
    norm_by_keyword: "'weight_offset' is keyword-only, not positional or keyword",
    norm_by_position: "'weight_offset' is positional-only, not positional or keyword",
    norm_of_anything: "it has no parameter 'x'",
    norm_misspelt: "it has no parameter 'weight'; no call gives its parameter 'wieght', which has no default",
}


@pytest.mark.parametrize("run", WRONG_SIGNATURES, ids=lambda run: run.__name__)
def test_another_signature_than_the_ops_is_refused(run):
    """Otherwise the first request would raise a TypeError, or pass the wrong argument."""
    with pytest.raises(ValueError, match="rms_norm=mine has another signature than its op: ") as refused:
        kernel(ops.rms_norm, name="mine")(run)
    assert WRONG_SIGNATURES[run] in str(refused.value)
    assert str(refused.value).endswith("as the op does: def rms_norm(x, weight, epsilon, weight_offset=0.0)")
    assert "mine" not in kernels_of("rms_norm")


def norm_with_an_option(x, weight, epsilon, weight_offset=0.0, warps=4): ...
def norm_with_more_of_anything(x, weight, epsilon, weight_offset=0.0, *args, tile=64, **kwargs): ...
def attention_without_keywords(
    query, kv_cache, batch, out, scale, window=None, soft_cap=0.0, alibi_slopes=None, sinks=None, k_scale=None,
    v_scale=None,
): ...  # fmt: skip


@pytest.mark.parametrize(
    ("op", "run"),
    [
        (ops.rms_norm, norm_with_an_option),
        (ops.rms_norm, norm_with_more_of_anything),
        (ops.paged_attention, attention_without_keywords),
    ],
)
def test_a_kernel_may_take_more_than_its_op(op, run):
    """Every call that its op accepts binds in the same way."""
    kernel(op, name="mine")(run)
    assert kernels_of(op.name)["mine"].run is run
