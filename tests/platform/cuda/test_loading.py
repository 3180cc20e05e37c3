"""Loading a model on a GPU and the end of the warm-up, with workers whose parts do nothing."""

import contextlib
import importlib.util
import inspect
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("triton"), reason="Triton is not installed: runs where it is"
)


def test_kernels_are_launched_while_weights_load(monkeypatch):
    """vLLM quantises weights to fp8 then, by opset's kernel. If it is only compiled, they are noise."""
    from triton.runtime.jit import JITFunction

    from vllm_opset.platform.cuda import worker

    run, ran = JITFunction.run, []
    note = lambda what: lambda *_, **__: ran.append((what, JITFunction.run is run))  # noqa: E731

    @contextlib.contextmanager
    def draws_meanwhile(worker):
        ran.append("draws")
        yield
        ran.append("no draws")

    monkeypatch.setattr(worker.OpsetWorker, "load_model", note("weights"))
    monkeypatch.setattr(worker, "call_sampler", note("sampler"))
    monkeypatch.setattr(worker, "step_of_few_tokens", lambda runner: None)
    for module, name in (
        ("graphs", "are_piecewise"), ("quantised_weights", "register"), ("fusion", "bind"),
        ("weights", "offloads"), ("linear", "bind"), ("compile_cache", "keep_kernels_apart"), ("refusals", "compiles"),
        ("warm_up", "takes_any_values"), ("quantised_inputs", "bind"),
    ):  # fmt: skip
        monkeypatch.setattr(getattr(worker, module), name, lambda *_, **__: False)
    monkeypatch.setattr(worker.OpsetCudaWorker, "install_sampler", lambda self: True)
    monkeypatch.setattr(worker.OpsetCudaWorker, "will_draw", lambda self: True)
    monkeypatch.setattr(worker.warm_up, "draws_meanwhile", draws_meanwhile)
    made = worker.OpsetCudaWorker.__new__(worker.OpsetCudaWorker)
    made.vllm_config = SimpleNamespace(use_v2_model_runner=True)
    made.model_config, made.model_runner = None, SimpleNamespace(get_model=lambda: None)
    made.load_model()
    assert ran == ["draws", ("weights", True), "no draws", ("sampler", False)]


@pytest.mark.parametrize(
    ("changes", "draws"),
    [
        ({}, True),
        ({"runner_type": "pooling"}, False),
        ({"is_last_rank": False}, False),
        ({"fits": False}, False),
        ({"speculative_config": object()}, False),
        ({"speculative_config": object(), "use_v2_model_runner": False}, True),
    ],
)
def test_draws_are_compiled_where_the_sampler_will_be_replaced(changes, draws, monkeypatch):
    from vllm_opset.platform.cuda import starting

    given = {"runner_type": "generate", "is_last_rank": True, "fits": True, "speculative_config": None}
    found = SimpleNamespace(**given | {"use_v2_model_runner": True} | changes)
    monkeypatch.setattr(starting, "get_pp_group", lambda: found)
    monkeypatch.setattr(starting.sampler, "fits", lambda: found.fits)
    worker = starting.Starting.__new__(starting.Starting)
    worker.vllm_config = worker.model_config = found
    assert worker.will_draw() is draws


@pytest.mark.parametrize("platform", ["cuda", "native"])
def test_a_worker_of_its_own_process_leaves_a_draft_models_settings_to_the_platform(platform, monkeypatch):
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_worker import Worker

    class Loads(Exception):
        """Ends the test where vLLM would load the model."""

    def load_model(self, **kwargs) -> None:
        raise Loads

    worker = importlib.import_module(f"vllm_opset.platform.{platform}.worker")
    kind = next(value for name, value in vars(worker).items() if name.lower() == f"opset{platform}worker")
    monkeypatch.setattr(Worker, "load_model", load_model)
    for module, name in (("graphs", "are_piecewise"), ("quantised_weights", "register")):
        monkeypatch.setattr(getattr(worker, module, worker), name, lambda *_: False, raising=False)
    monkeypatch.setattr(
        VllmConfig, "try_verify_and_update_config", inspect.unwrap(VllmConfig.try_verify_and_update_config)
    )
    made = kind.__new__(kind)
    made.vllm_config = SimpleNamespace(use_v2_model_runner=True)
    made.model_config, made.parts = SimpleNamespace(is_moe=False, runner_type="pooling"), set()
    with contextlib.suppress(Loads):
        made.load_model()
    assert hasattr(VllmConfig.try_verify_and_update_config, "__wrapped__")


def test_ops_on_vllms_own_wheel_refuse_lengths_beyond_the_rotary_embedding(monkeypatch):
    from vllm.model_executor.layers.attention import Attention

    from vllm_opset.model.layers import RotaryEmbeddingLayer
    from vllm_opset.platform.native import worker
    from vllm_opset.unsupported import Refusal

    class Rotary(RotaryEmbeddingLayer, torch.nn.Module):
        pass

    model = torch.nn.Module()
    for name, kind in (("rotary_emb", Rotary), ("attn", Attention)):
        part = kind.__new__(kind)
        torch.nn.Module.__init__(part)
        setattr(model, name, part)
    model.rotary_emb.cos_sin_cache = torch.zeros(512, 8)
    monkeypatch.setattr(worker.PackingWorker, "load_model", lambda self: None)
    monkeypatch.setattr(worker, "_opset_layers", contextlib.nullcontext)
    monkeypatch.setattr(worker.model_settings, "take_back", lambda: None)
    monkeypatch.setattr(worker.OpsetNativeWorker, "models", [])
    made = worker.OpsetNativeWorker.__new__(worker.OpsetNativeWorker)
    made.parts, made.model_runner = {"ops"}, SimpleNamespace(get_model=lambda: model)
    made.model_config = SimpleNamespace(max_model_len=1024, quantization=None)
    with pytest.raises(Refusal, match="embedding has 512 positions: give --max-model-len 512"):
        made.load_model()


@pytest.mark.parametrize("platform", ["cuda", "native"])
def test_what_follows_vllms_warm_up(platform, monkeypatch):
    from vllm_opset.platform.cuda import starting

    worker, ran = importlib.import_module(f"vllm_opset.platform.{platform}.worker"), []
    kind = next(value for name, value in vars(worker).items() if name.lower() == f"opset{platform}worker")
    made = kind.__new__(kind)
    made.parts, made.model_runner = {"sampler"}, None
    base = worker.OpsetWorker if platform == "cuda" else worker.PackingWorker
    monkeypatch.setattr(base, "compile_or_warm_up_model", lambda self: ran.append("warm") or "times")
    monkeypatch.setattr(worker, "assume_unchanged", lambda: ran.append("assumed"))
    monkeypatch.setattr(worker.warm_up, "sampler", lambda runner: None, raising=False)
    monkeypatch.setattr(worker.compat, "own_warm_up", lambda kernels: contextlib.nullcontext())
    monkeypatch.setattr(kind, "check_choices", lambda self: None)
    monkeypatch.setattr(kind, "leave_out_rows", lambda self: ran.append("rows left out"), raising=False)
    captures = (("logits_graphs", "capture"), ("draft_graphs", "capture"), ("replays", "build_no_metadata"))
    for module, name in captures:
        monkeypatch.setattr(getattr(starting, module), name, lambda worker, module=module: ran.append(module))
    assert made.compile_or_warm_up_model() == "times"
    last = ["rows left out"] if platform == "cuda" else []  # a compiler on vLLM's own wheel needs all rows
    assert ran == ["warm", *(module for module, _ in captures), "assumed", *last]


@pytest.mark.parametrize("platform", ["cuda", "native"])
def test_graphs_end_before_vllms_runner(platform, monkeypatch):
    from vllm.v1.worker.gpu_worker import Worker

    from vllm_opset.platform.cuda import starting

    worker, ended = importlib.import_module(f"vllm_opset.platform.{platform}.worker"), []
    kind = next(value for name, value in vars(worker).items() if name.lower() == f"opset{platform}worker")
    monkeypatch.setattr(Worker, "shutdown", lambda self: ended.append("vLLM's runner"))
    for module in ("logits_graphs", "draft_graphs"):
        monkeypatch.setattr(getattr(starting, module), "drop", lambda worker, module=module: ended.append(module))
    kind.__new__(kind).shutdown()
    assert ended == ["logits_graphs", "draft_graphs", "vLLM's runner"]
