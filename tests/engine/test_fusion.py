"""Rotary embedding, norms of query and key, and cache write in one call: whole models, compared with no fusion."""

import copy
import functools

import models
import pytest
import torch
from engines import generate, report, served, tokens

pytestmark = [
    pytest.mark.engine,
    pytest.mark.window,
    # On a GPU every engine fuses, and test_engine_on_gpu.py counts its launches.
    pytest.mark.skipif(torch.cuda.is_available(), reason="a worker for CPUs that fuses: runs where there is no GPU"),
]

PARTS = {"rotary_embedding", "reshape_and_cache"}
FUSED = {
    "qwen3": "qk_norm_rope_cache",
    "gemma3": "qk_norm_rope_cache",
    "llama3": "rope_cache",
    "mistral": "rope_cache",
    "gemma2": "rope_cache",
}


def generated(llm) -> list[list[int]]:
    return tokens(generate(llm, models.prompts()))


def calls(llm) -> dict[str, int]:
    """The calls of the kernels that one worker chose, by op."""
    return {row["op"]: row["calls"] for row in report(llm)}


def embedded(llm) -> torch.Tensor:
    outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in models.prompts()], use_tqdm=False)
    return torch.tensor([output.outputs.embedding for output in outputs])


def without_fusing(engine, path, ask=generated, parts=PARTS, **arguments):
    """The answers without fusion. The engine is gone before the next one starts."""
    with engine(path, worker_cls="fusing_worker.SeparateWorker", **{"max_num_batched_tokens": 64, **arguments}) as llm:
        answers = ask(llm)
        assert served(llm).keys() >= parts
    return answers


def fusing(engine, path, **arguments):
    return engine(path, worker_cls="fusing_worker.FusingWorker", **{"max_num_batched_tokens": 64, **arguments})


@pytest.mark.parametrize("name", FUSED)
def test_tokens_are_the_same(name, engine, tmp_path):
    models.build(name, tmp_path)
    expected = without_fusing(engine, tmp_path)
    with fusing(engine, tmp_path) as llm:
        # Each layer's parts run once when fusing is tried out.
        tried = calls(llm)
        assert generated(llm) == expected
        assert llm.collective_rpc("lost_parameters") == [[]]
        ran = calls(llm)
    assert ran[FUSED[name]] > 0
    assert "reshape_and_cache" not in ran and ran["rotary_embedding"] == tried["rotary_embedding"]


def test_of_one_models_layers_some_are_deferred_and_some_are_not(engine, tmp_path):
    models.build("exaone4", tmp_path)
    expected = without_fusing(engine, tmp_path)
    with fusing(engine, tmp_path) as llm:
        assert generated(llm) == expected
        assert served(llm).keys() >= {"qk_norm_rope_cache", "reshape_and_cache"}


def test_attention_that_writes_no_cache_defers_nothing(engine, tmp_path):
    models.build("qwen3", tmp_path, is_causal=False)
    models.add_tokenizer(tmp_path)
    pooling = {"runner": "pooling", "max_num_batched_tokens": 512}
    expected = without_fusing(engine, tmp_path, embedded, {"rotary_embedding"}, **pooling)
    with fusing(engine, tmp_path, **pooling) as llm:
        torch.testing.assert_close(embedded(llm), expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"compilation_config__mode": 3},
        {"offload_config__prefetch__offload_group_size": 2},
    ],
)
def test_nothing_is_deferred_where_parts_do_not_run_together(changes):
    from vllm.config import CompilationMode, VllmConfig

    from vllm_opset.model import fusion

    config = VllmConfig()
    config.compilation_config.mode = CompilationMode.NONE
    assert fusion.runs_together(config)
    for path, value in changes.items():
        *folder, name = path.split("__")
        object.__setattr__(functools.reduce(getattr, folder, config), name, value)
    assert not fusion.runs_together(config)


def test_replayed_pieces_have_the_positions_they_were_captured_with():
    """A replay does not call the rotary embedding. The last call of it may have come from a step of another size."""
    from vllm.config import CUDAGraphMode, VllmConfig
    from vllm.forward_context import BatchDescriptor, set_forward_context

    from vllm_opset.model.fusion import DeferredRotaryEmbedding

    rope = DeferredRotaryEmbedding(rotary=None, norms=None)
    query = key = torch.zeros(0)

    def step(num_tokens: int, mode: CUDAGraphMode, called: bool) -> torch.Tensor:
        descriptor = BatchDescriptor(num_tokens)
        with set_forward_context(None, VllmConfig(), cudagraph_runtime_mode=mode, batch_descriptor=descriptor):
            if called:
                rope(torch.arange(num_tokens), query, key)
            return rope.current_positions()

    for num_tokens in (8, 4):
        step(num_tokens, CUDAGraphMode.PIECEWISE, called=True)
    assert len(step(3, CUDAGraphMode.NONE, called=True)) == 3
    assert len(step(8, CUDAGraphMode.PIECEWISE, called=False)) == 8
    assert len(step(1, CUDAGraphMode.FULL, called=True)) == 1
    assert len(step(4, CUDAGraphMode.PIECEWISE, called=False)) == 4


def _derived(module, method):
    """The same module, but of a class whose method of this name may take other arguments."""
    other = copy.copy(module)
    other.__class__ = type("Derived", (type(module),), {method: lambda self, *args: None})
    return other


# Layers whose attention, norms or rotary embedding prevent a single launch.
OTHERWISE = {
    "attention writes no cache": lambda layer: (vars(layer.attn.impl), "writes_cache", False),
    "attention finds scales": lambda layer: (vars(layer.attn), "calculate_kv_scales", True),
    "attention of a derived class": lambda layer: (layer._modules, "attn", _derived(layer.attn, "forward")),
    "rotary embedding of a derived class": lambda layer: (
        layer._modules,
        "rotary_emb",
        _derived(layer.rotary_emb, "forward_oot"),
    ),
    "one norm": lambda layer: (layer._modules, "k_norm", None),
    "norms switched off": lambda layer: (vars(layer.q_norm), "opset_is_wanted", False),
    "norms of different epsilons": lambda layer: (vars(layer.k_norm), "variance_epsilon", 1e-3),
    "a norm of all heads": lambda layer: (layer.q_norm._parameters, "weight", torch.nn.Parameter(torch.ones(128))),
    "a dtype without a kernel": lambda layer: (vars(layer.attn.impl), "dtype", torch.float64),
}


def test_layers_whose_parts_cannot_be_one_launch(engine, tmp_path):
    from vllm_opset.model import fusion

    models.build("qwen3", tmp_path)
    with engine(tmp_path, worker_cls="fusing_worker.SeparateWorker") as llm:
        model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
        layer = model.model.layers[0].self_attn
        rope = fusion._rope_of(layer)
        assert rope is not None and fusion._can_be_deferred(layer, rope, llm.llm_engine.vllm_config)
        for name, otherwise in OTHERWISE.items():
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(*otherwise(layer))
                assert fusion._rope_of(layer) is None, name
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(vars(layer), "forward", lambda positions, hidden_states, scale: hidden_states)
            assert not fusion._can_be_deferred(layer, rope, llm.llm_engine.vllm_config)


@pytest.mark.parametrize("scales", [(0.5, 1.0, 0.0), (1.0, 0.5, 0.0), (1.0, 1.0, 0.5)], ids=["query", "key", "value"])
def test_parts_that_are_not_all_there_is_are_not_deferred(scales, engine, tmp_path, monkeypatch):
    """Uses a model that scales query or key between norms and rotary embedding, or adds the normalised key to value."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models.qwen3 import Qwen3Attention

    class Scaled(Qwen3Attention):
        def forward(self, positions, hidden_states):
            qkv, _ = self.qkv_proj(hidden_states)
            q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
            q = self.q_norm(q.unflatten(-1, (-1, self.head_dim))).flatten(-2)
            k = self.k_norm(k.unflatten(-1, (-1, self.head_dim))).flatten(-2)
            v = v + scales[2] * k
            q, k = self.rotary_emb(positions, q * scales[0], k * scales[1])
            return self.o_proj(self.attn(q, k, v))[0]

    monkeypatch.setattr("vllm.model_executor.models.qwen3.Qwen3Attention", Scaled)
    models.build("qwen3", tmp_path)
    expected = without_fusing(engine, tmp_path)
    with fusing(engine, tmp_path) as llm:
        assert generated(llm) == expected
        assert served(llm).keys() >= PARTS and "qk_norm_rope_cache" not in served(llm)
        model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    assert all(isinstance(layer.self_attn.attn, Attention) for layer in model.model.layers)
