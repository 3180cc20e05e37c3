"""The shapes of models and the cases of `vllm-opset bench e2e`."""

import json
import statistics
from pathlib import Path

import pytest

from vllm_opset.bench import shapes
from vllm_opset.bench.cases import GREEDY, Batch, Request, Trace
from vllm_opset.bench.compare import ComparisonPlan
from vllm_opset.bench.figures import ACCEPTANCE, Run

KIB = 2**10
# Bytes of one token, from the published configurations.
KV_BYTES = {
    "bloom-7b1": 480,
    "eagle3-llama-3.1-8b": 4,
    "ernie-4.5-21b-a3b": 56,
    "gemma-2-9b": 336,
    "gpt-oss-20b": 48,
    "llama-3.1-8b": 128,
    "llama-3.1-8b-awq": 128,
    "llama-3.2-1b": 32,
    "mistral-7b": 128,
    "qwen2.5-7b": 56,
    "qwen3-0.6b": 112,
    "qwen3-14b": 160,
    "qwen3-30b-a3b": 96,
    "qwen3-30b-a3b-awq": 96,
    "qwen3-30b-a3b-fp8": 96,
    "qwen3-8b": 144,
    "qwen3-8b-fp8": 144,
    "qwen3-8b-fp8-channel": 144,
    "qwen3-next-80b-a3b": 96,
    "qwen3-vl-8b": 144,
    "tiny": 2,
}

# Stock vLLM alone serves these, where Hugging Face's classes for images are installed, too.
ON_STOCK = ("qwen3-next-80b-a3b", "qwen3-vl-8b")
# It drafts for another, and answers nothing by itself.
DRAFT = "eagle3-llama-3.1-8b"


@pytest.mark.parametrize("name", ON_STOCK)
def test_vllm_reads_the_shapes_that_it_serves_alone(name, tmp_path):
    from vllm.transformers_utils.config import get_config

    shape = shapes.load(name)
    (tmp_path / "config.json").write_text(json.dumps(shape.config))
    config = get_config(str(tmp_path), trust_remote_code=False)
    text = config.get_text_config()
    assert config.architectures == shape.config["architectures"] and text.vocab_size == shape.text_config["vocab_size"]
    assert 4 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim == KV_BYTES[name] * KIB


@pytest.mark.parametrize("name", [name for name in shapes.names() if name not in (*ON_STOCK, DRAFT)])
def test_vllm_takes_every_other_shape_with_the_arguments_of_the_engines(name, tmp_path):
    from vllm.engine.arg_utils import EngineArgs

    shape = shapes.load(name)
    (tmp_path / "config.json").write_text(json.dumps(shape.config))
    config = EngineArgs(**ComparisonPlan(shape, shape.cases, [], 1, False).engine_args(tmp_path)).create_engine_config()
    model, parallel = config.model_config, config.parallel_config
    assert model.architecture == shape.config["architectures"][0]
    assert config.cache_config.kv_cache_memory_bytes == shape.kv_cache_bytes(shape.cases)
    heads, head_size, itemsize = model.get_num_kv_heads(parallel), model.get_head_size(), model.dtype.itemsize
    assert 2 * model.get_num_layers(parallel) * heads * head_size * itemsize == KV_BYTES[name] * KIB


@pytest.mark.parametrize("name", shapes.names())
def test_all_requests_of_a_case_fit_into_the_cache(name):
    shape = shapes.load(name)
    for case in shape.cases:
        tokens = shape.kv_cache_bytes([case]) // (KV_BYTES[name] * KIB)
        assert tokens >= max(sum(case.lengths_at_once()), shape.max_model_len)
    assert shape.kv_cache_bytes([]) // (KV_BYTES[name] * KIB) >= shape.max_model_len


def test_a_shape_has_what_it_shares_with_its_base():
    base, shape = shapes.load("qwen3-8b"), shapes.load("qwen3-8b-fp8")
    scheme = shape.config["quantization_config"]
    assert shape.config == base.config | {"quantization_config": scheme} and scheme["quant_method"] == "fp8"
    assert shape.name == "Qwen3-8B in block fp8" and shape.cases == base.cases


@pytest.mark.parametrize(("method", "name"), [("draft_model", "llama-3.2-1b"), ("eagle3", DRAFT)])
def test_a_shape_may_draft_for_another(method, name, tmp_path):
    drafts = {"method": method, "model": name, "num_speculative_tokens": 3}
    given = {"max_num_seqs": 4, "speculative_config": drafts}
    found = shapes.with_draft(given, tmp_path)
    folder = Path(found["speculative_config"]["model"])
    assert found == given | {"speculative_config": drafts | {"model": str(folder)}}
    assert json.loads((folder / "config.json").read_text()) == shapes.load(name).config
    upper = shapes.with_draft({"speculative_config": drafts | {"model": name.upper()}}, tmp_path)
    assert upper["speculative_config"] == found["speculative_config"]
    by_n_grams = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    assert shapes.with_draft(by_n_grams, tmp_path) == by_n_grams and shapes.with_draft({}, tmp_path) == {}


def test_cases_are_those_that_the_context_has_room_for():
    names = [case.name for case in shapes.load("qwen3-8b").cases]
    assert names == [
        "1x1024/128", "16x1024/128", "64x1024/128", "256x512/128", "64x1024/128 sampled", "8x8192/8", "16x8192/128",
        "4x3000/200", "trace of 320, up to 3000/256",
    ]  # fmt: skip
    longer = {"8x8192/8", "16x8192/128"}
    assert [case.name for case in shapes.load("Gemma-2-9B").cases] == [name for name in names if name not in longer]


def test_prompts_are_the_same_every_time_and_different_ones():
    case, vocab_size = Batch(batch=8, prompt=64, output=2), 1000
    prompts = case.prompts(vocab_size)
    woken, begun, complete = case.rounds(vocab_size)
    assert (len(woken), begun[0].max_tokens, complete[7]) == (1, 1, Request(prompts[7], 2))
    assert prompts == case.prompts(vocab_size) and len(set(map(tuple, prompts))) == 8
    assert {len(prompt) for prompt in prompts} == {64}
    assert all(0 < token < vocab_size for prompt in prompts for token in prompt)


def test_a_trace_mixes_lengths_and_sampling_and_does_not_fit_at_once():
    trace = Trace(trace=60, prompt=200, output=24)
    _, requests = trace.rounds(1000)
    assert requests == trace.rounds(1000)[-1] and len(requests) == 60
    prompts, answers = [len(one.prompt) for one in requests], [one.max_tokens for one in requests]
    assert min(prompts) >= 16 and max(prompts) <= 200 and statistics.median(prompts) < statistics.mean(prompts)
    assert min(answers) >= 8 and max(answers) <= 24
    kinds = [one.sampling for one in requests]
    assert sum(kind == GREEDY for kind in kinds) == 20 and len({kind.get("seed") for kind in kinds}) == 21
    assert len(trace.lengths_at_once()) == 30
    steps = 60 + (sum(answers) - 60) // 2
    metrics = trace.metrics([Run(None, 2.0, [], steps)])
    assert metrics["output tokens/s"] == [sum(answers) / 2] and metrics[ACCEPTANCE] == [pytest.approx(2, rel=1e-3)]
