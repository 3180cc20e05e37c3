"""Decode steps whose LM head is captured, and that build no metadata, give the same answers, on GPUs."""

import string

import engines
import models
import pytest
import torch
from engines import tokens

from vllm_opset.platform import second_runner

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: runs on one"),
    pytest.mark.skipif(
        not second_runner.sample_by.bridge.needed(),
        reason="opset captures nothing more up to vLLM 0.30: ends when 0.31 is the oldest supported release",
    ),
]

GREEDY, SAMPLED = {"temperature": 0}, {"temperature": 1.5, "seed": 11}
# What the requests of a batch ask for, in turn.
BATCHES = {
    "greedy": [GREEDY],
    "sampled": [SAMPLED],
    "greedy and sampled": [GREEDY, {**SAMPLED, "top_k": 40, "top_p": 0.9}, {**SAMPLED, "min_p": 0.05}],
    "penalties": [{**GREEDY, "repetition_penalty": 1.3, "presence_penalty": 0.5}, GREEDY],
    "bias": [{**GREEDY, "logit_bias": {5: 20.0, 6: -100.0}}, GREEDY],
    "allowed tokens": [{**GREEDY, "allowed_token_ids": [10, 20, 30]}, SAMPLED],
    "at least": [{**GREEDY, "min_tokens": 6, "stop_token_ids": list(range(3, 100)), "ignore_eos": False}, GREEDY],
    "bad words": [{**GREEDY, "bad_words": [*string.ascii_letters]}, SAMPLED],
    "log-probabilities": [{**GREEDY, "logprobs": 3, "prompt_logprobs": 2}, {**SAMPLED, "logprobs": 0}],
    "structured": [{**GREEDY, "structured_outputs": r"[a-f]{4}-\d{3}"}, GREEDY],
}


def answers(llm) -> dict[str, list]:
    """The outputs of each batch. Requests end at different steps, so the sizes of its steps differ."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    def parameters(number: int, asked: dict) -> SamplingParams:
        if regex := asked.get("structured_outputs"):
            asked = asked | {"structured_outputs": StructuredOutputsParams(regex=regex)}
        return SamplingParams(**{"max_tokens": 8 + 3 * number, "ignore_eos": "structured_outputs" not in asked} | asked)

    prompts = [{"prompt_token_ids": prompt} for prompt in models.prompts() * 2]
    found = {}
    for name, batch in BATCHES.items():
        asked = [parameters(number, batch[number % len(batch)]) for number in range(len(prompts))]
        found[name] = llm.generate(prompts, asked, use_tqdm=False)
    return found


@pytest.fixture(scope="module", params=["qwen3", "gemma2"])
def both(request, engine, tmp_path_factory) -> tuple[dict, dict, list[int]]:
    """The answers without and with these graphs, and the rows of the steps that they replayed. Gemma-2 caps logits."""
    from vllm_opset.model.sampler import OpsetSampler
    from vllm_opset.platform.cuda import logits_graphs, replays

    folder = tmp_path_factory.mktemp(request.param)
    models.build(request.param, folder)
    models.add_tokenizer(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logits_graphs, "_may_capture", lambda worker: False)
        patch.setattr(replays, "_only_layers_read_it", lambda worker: False)
        patch.setattr(OpsetSampler, "_is_plain_greedy", lambda self, requests: False)
        with engine(folder) as llm:
            without = answers(llm)
    with engine(folder) as llm:
        runner = engines.runner(llm)
        assert "prepare_attn" in vars(runner.model_state), "metadata is built in each step"
        sampler, replayed = type(runner.sampler).__call__, []
        with pytest.MonkeyPatch.context() as patch:
            captured = {logits.data_ptr() for _, logits in runner.sample.__self__._captured.values()}

            def count(self, logits: torch.Tensor, batch):
                if logits.data_ptr() in captured:
                    replayed.append(len(logits))
                return sampler(self, logits, batch)

            patch.setattr(type(runner.sampler), "__call__", count)
            return without, answers(llm), replayed


@pytest.mark.parametrize("name", BATCHES)
def test_the_tokens_are_the_same(name, both):
    without, with_graphs, _ = both
    assert tokens(with_graphs[name]) == tokens(without[name])


def test_the_log_probabilities_are_the_same(both):
    without, with_graphs = (
        [step[token].logprob for output in outputs["log-probabilities"] for step, token in _steps(output)]
        for outputs in both[:2]
    )
    torch.testing.assert_close(torch.tensor(with_graphs), torch.tensor(without), rtol=1e-4, atol=1e-4)


def _steps(output) -> zip:
    answer = output.outputs[0]
    return zip(answer.logprobs, answer.token_ids, strict=True)


def test_steps_of_many_sizes_were_replayed(both):
    sizes = set(both[2])
    assert 1 in sizes and any(size & (size - 1) for size in sizes), "no graph was filled up"
