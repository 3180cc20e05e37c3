"""Loading a model on a GPU without vLLM's compiled kernels, with workers whose parts do nothing."""

import importlib.util
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("triton"), reason="Triton is not installed: runs where it is"
)


def test_kernels_are_launched_while_weights_load(monkeypatch):
    """vLLM quantises weights to fp8 then, by opset's kernel. If it is only compiled, they are noise."""
    from triton.runtime.jit import JITFunction

    from vllm_opset.platform.cuda import worker

    run, ran = JITFunction.run, []
    note = lambda what: lambda *_, **__: ran.append((what, JITFunction.run is run))  # noqa: E731
    monkeypatch.setattr(worker.OpsetWorker, "load_model", note("weights"))
    monkeypatch.setattr(worker, "call_sampler", note("sampler"))
    for module, name in (
        ("graphs", "in_pieces"), ("quantised_weights", "register"), ("sampler", "install"), ("fusion", "bind"),
        ("weights", "offloads"), ("linear", "bind"), ("compile_cache", "keep_kernels_apart"), ("refusals", "compiles"),
    ):  # fmt: skip
        monkeypatch.setattr(getattr(worker, module), name, lambda *_, **__: False)
    made = worker.OpsetCudaWorker.__new__(worker.OpsetCudaWorker)
    made.vllm_config = SimpleNamespace(use_v2_model_runner=True)
    made.model_config, made.model_runner = None, SimpleNamespace(get_model=lambda: None)
    made.load_model()
    assert ran == [("weights", True), ("sampler", False)]
