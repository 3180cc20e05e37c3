"""The start of an engine on a GPU: memory that is short, memory for attention, and the cache of torch.compile."""

import json
from pathlib import Path

import pytest
import torch
from processes import ROOT, Finished, run

from vllm_opset.platform import stock

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not stock.has_kernels_for_cuda(),
    reason="needs an NVIDIA GPU and stock vLLM: runs on one",
)

MODEL = ROOT / "examples" / "tiny-qwen3"
ENGINE = Path(__file__).with_name("started_engine.py")
# Each platform with a compiler, and its parts.
COMPILED = {
    "cuda": {"compilation_config": {"mode": 3}},
    "native": {"additional_config": {"opset": {"native": {"linear": "on"}}}},
}
# With it, vLLM does not measure the GPU's free memory, which other tests' engines change meanwhile.
FIXED_MEMORY = {"kv_cache_memory_bytes": 1 << 30}
# vLLM says this if another engine returned memory while this one measured. A test then starts its engine anew.
MEMORY_RETURNED, ATTEMPTS = "Error in memory profiling", 3
# A workspace of the largest size: as many heads of keys as of queries, and eight queries a request.
NUM_REQS = 1024
WITHOUT_GROUPS = {
    "hidden_size": 4096,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "vocab_size": 2048,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
}
DRAFTED = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.fixture
def answers(tmp_path) -> Path:
    """The file to which `started` writes the engine's answers."""
    return tmp_path / "answers.json"


def started(platform: str, arguments: dict, answers: Path, num_reqs: int = 4, **variables: object) -> Finished:
    """An engine that answers `num_reqs` prompts, in a process of its own."""
    given = {"model": str(MODEL), "max_model_len": 512, "gpu_memory_utilization": 0.1, **arguments}
    return run(
        "python", ENGINE, json.dumps(given), num_reqs, answers,
        OPSET_PLATFORM=platform, VLLM_USE_FLASHINFER_SAMPLER=0, **variables,
    )  # fmt: skip


@pytest.mark.parametrize("platform", ["cuda", "native"])
def test_an_engine_without_enough_memory_names_the_settings(platform, answers):
    more_than_there_is = 2 * torch.cuda.get_device_properties(0).total_memory
    ended = started(platform, {"kv_cache_memory_bytes": more_than_there_is}, answers)
    assert ended.code != 0
    assert "the GPU's memory is not enough to start: lower --max-num-batched-tokens" in ended.output, ended.output


@pytest.mark.parametrize("platform", COMPILED)
def test_a_second_start_compiles_nothing(platform, answers, tmp_path):
    def start() -> tuple[str, set[Path]]:
        ended = started(platform, FIXED_MEMORY | COMPILED[platform], answers, VLLM_CACHE_ROOT=tmp_path)
        assert ended.code == 0, ended.output
        return answers.read_text(), set(tmp_path.glob("torch_compile_cache/*/*"))

    first, compiled = start()
    assert compiled, "nothing was compiled"
    assert start() == (first, compiled)


def test_drafts_of_many_requests_fit_beside_the_kv_cache(answers, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(WITHOUT_GROUPS))
    arguments = {
        "model": str(tmp_path),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_num_seqs": NUM_REQS,
        "gpu_memory_utilization": 0.3,
        "speculative_config": DRAFTED,
    }
    for _ in range(ATTEMPTS):
        ended = started("cuda", arguments, answers, NUM_REQS)
        if MEMORY_RETURNED not in ended.output:
            break
    assert ended.code == 0, ended.output
    assert len(json.loads(answers.read_text())) == NUM_REQS
