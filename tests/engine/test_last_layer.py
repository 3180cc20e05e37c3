"""The last layer computes the rows that vLLM reads, and its answers are as those of all rows."""

import models
import pytest
import torch
from engines import generate, runner, tokens
from torch import nn

from vllm_opset.model import last_layer
from vllm_opset.model.warm_up import step_of_few_tokens
from vllm_opset.platform import second_runner

pytestmark = [pytest.mark.engine, pytest.mark.window]

DRAFTS = pytest.mark.skipif(
    not torch.cuda.is_available() and not second_runner.drafts_without_triton(),
    reason="opset refuses drafts on a CPU with older releases: runs with 0.32 and later",
)
PROMPTS = [models.prompts()[number] for number in (3, 4)]
EAGER = {"enforce_eager": True}  # CUDA graphs serve all rows


def rows_of(llm) -> tuple[list[int], list[int]]:
    """Lists to which each step adds the rows that the output projections of the first and the last layer compute."""
    first, last = [], []
    layers = runner(llm).model.model.layers
    for layer, rows in ((layers[0], first), (layers[-1], last)):
        attention = layer.attn if hasattr(layer, "attn") else layer.self_attn
        attention.o_proj.register_forward_hook(lambda module, args, results, rows=rows: rows.append(len(results[0])))
    return first, last


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "mistral", "qwen3_moe", "gpt_oss", "hy_v3"])
def test_last_layers_compute_a_row_for_each_request(name, engine, tmp_path):
    models.build(name, tmp_path)
    with engine(tmp_path, **EAGER) as llm:
        first, last = rows_of(llm)
        generate(llm, PROMPTS, max_tokens=2)
    assert max(first) == sum(map(len, PROMPTS))
    assert max(last) == len(PROMPTS)


@pytest.mark.parametrize("name", ["exaone4", "granitemoe"])
def test_layers_of_another_structure_compute_all_rows(name, engine, tmp_path):
    """exaone4's norms come after attention and MLP, and granitemoe's layers add up their residual themselves."""
    models.build(name, tmp_path)
    with engine(tmp_path, **EAGER) as llm:
        first, last = rows_of(llm)
        generate(llm, PROMPTS, max_tokens=2)
    assert first == last


def test_all_rows_are_computed_while_a_request_wants_logprobs_of_its_prompt(engine, tmp_path):
    models.build("qwen3", tmp_path)
    with engine(tmp_path, **EAGER) as llm:
        first, last = rows_of(llm)
        answers = tokens(generate(llm, PROMPTS))
        first.clear(), last.clear()
        outputs = generate(llm, PROMPTS, prompt_logprobs=0)
        assert first == last
        generate(llm, PROMPTS, max_tokens=1)
        assert first[-1] > last[-1], "the requests with log-probabilities have ended"
    assert tokens(outputs) == answers


@DRAFTS
def test_all_rows_are_computed_where_tokens_are_drafted(engine, tmp_path):
    models.build("qwen3", tmp_path)
    ngrams = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    with engine(tmp_path, speculative_config=ngrams, **EAGER) as llm:
        first, last = rows_of(llm)
        generate(llm, PROMPTS, max_tokens=4)
    assert first == last


def test_code_that_mixes_rows_is_found(engine, tmp_path):
    """Such as a gate that a layer computes before its attention, for all rows, and multiplies its result by."""
    models.build("qwen3", tmp_path)
    with engine(tmp_path, **EAGER) as llm:
        worker = llm.llm_engine.model_executor.driver_worker.worker
        model = worker.model_runner.model.model
        (ends, _), step = last_layer._ends_of(model), step_of_few_tokens(worker.model_runner)
        assert last_layer._treats_rows_alone(ends, step)
        model.layers[-1].self_attn = _Gated(model.layers[-1].self_attn)
        assert not last_layer._treats_rows_alone(ends, step)
        model.layers = nn.ModuleList()
        assert last_layer._ends_of(model) is None


class _Gated(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.of_vllm = attention

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        gate = hidden_states.sigmoid()
        return gate * self.of_vllm(positions=positions, hidden_states=hidden_states)
