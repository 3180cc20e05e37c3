"""Models that draft tokens change no answer on a CPU, where opset replaces vLLM's Triton kernels.

A CUDA graph of a draft model is emulated: a replay runs the captured function again, with the tensors that it was
captured with.
"""

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import drafting
import models
import pytest
import torch
from engines import counter, generate, runner, tokens

from vllm_opset.platform import second_runner

pytestmark = [
    pytest.mark.engine,
    pytest.mark.window,
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu_features.py has these drafts on a GPU"),
    pytest.mark.skipif(
        not second_runner.drafts_without_triton(),
        reason="opset refuses drafts on a CPU with older releases: runs with 0.32 and later",
    ),
]

NUM_TOKENS, NUM_DRAFTED = 24, 3
LENGTHS = (1, 7, 40)
SIZES = (1, 2, 4)  # three requests fill up the last one
SAMPLED = {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "max_tokens": NUM_TOKENS}


class Built:
    """A target and what drafts for it. expected: the greedy answers of transformers to the prompts."""

    def __init__(self, method: str, folder: Path) -> None:
        self.target, draft = folder / "target", folder / "draft"
        for made in (self.target, draft):
            made.mkdir()
        reference = drafting.METHODS[method](self.target, draft)
        self.prompts = models.prompts(LENGTHS)
        self.expected = [models.generate(reference, prompt, NUM_TOKENS)[0] for prompt in self.prompts]
        self.speculative_config = drafting.config(method, draft, NUM_DRAFTED)

    def check(self, llm, method: str) -> None:
        """The answers are right, and drafts are accepted."""
        assert tokens(generate(llm, self.prompts, max_tokens=NUM_TOKENS)) == self.expected
        accepted, drafted = (counter(llm, f"spec_decode_num_{what}_tokens") for what in ("accepted", "draft"))
        assert accepted / drafted >= drafting.ACCEPTED.get(method, 0)


@pytest.mark.parametrize("method", drafting.METHODS)
def test_drafts_of_a_model_change_no_token(method, engine, tmp_path):
    built = Built(method, tmp_path)
    with engine(built.target, speculative_config=built.speculative_config, max_num_seqs=2) as llm:
        built.check(llm, method)
        together = tokens(generate(llm, built.prompts, seed=11, **SAMPLED))
        alone = [tokens(generate(llm, [prompt], seed=11, **SAMPLED))[0] for prompt in built.prompts]
        assert together == alone


class Graph:
    """Stands for a CUDA graph. run: writes again to `written`, the tensor that it returned when it was captured."""

    def __init__(self, run: Callable[[], torch.Tensor], starts: torch.Tensor) -> None:
        self.run, self.written, self.starts, self.replays = run, run(), starts, 0

    def replay(self) -> None:
        """Run it again, if the padded requests have no tokens."""
        starts, num_tokens = self.starts.tolist(), len(self.written)
        lengths = [end - start for start, end in itertools.pairwise(starts[: num_tokens // starts[1] + 1])]
        assert sum(lengths) <= num_tokens and set(lengths) <= {starts[1], 0}, lengths
        self.replays += 1
        self.run()


@pytest.fixture
def draft_by_graphs(monkeypatch):
    """`draft_by_graphs(speculator)`: let such graphs run the draft model.

    It returns them by a request's tokens and the number of requests.
    """
    from vllm_opset.platform.cuda import draft_graphs

    def draft_by_graphs(speculator) -> Mapping[int, Mapping[int, Graph]]:
        starts = speculator.input_buffers.query_start_loc
        monkeypatch.setattr(draft_graphs, "captured", lambda run, pool, stream: (Graph(run, starts), None))
        graphs = draft_graphs.DraftGraphs(speculator, SIZES, pool=None)
        second_runner.draft_by(speculator, graphs.run_model)
        return graphs._graphs

    return draft_by_graphs


def test_graphs_of_a_draft_model_change_no_token(engine, tmp_path, draft_by_graphs):
    """Three requests of unequal length end in one step, so the graphs for four of them replay, and none for fewer."""
    built = Built("draft_model", tmp_path)
    with engine(built.target, speculative_config=built.speculative_config) as llm:
        graphs = draft_by_graphs(runner(llm).speculator)
        built.check(llm, "draft_model")
    assert set(graphs) == {1, NUM_DRAFTED + 2}
    assert all(sizes[4].replays for sizes in graphs.values())
