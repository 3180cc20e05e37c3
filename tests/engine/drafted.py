"""drafted.py FOLDER: prints as JSON what an engine on a CPU answers with each method of drafting, and what is right.

opset refuses drafts on a CPU, because no functions of its own replace vLLM's Triton kernels for them. Here Triton's
interpreter runs these kernels, which takes TRITON_INTERPRET=1 and an empty CUDA_VISIBLE_DEVICES. All else is as with
vLLM's second model runner on a GPU: the copies of the configuration, the models' layers and the metadata. A CUDA graph
of a draft model is emulated: a replay runs the captured function again, with the tensors that it was captured with.
"""

import itertools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import drafting
import models
import torch
from engines import counter, generate, running, tokens
from engines import runner as runner_of
from vllm.platforms import current_platform

from vllm_opset.platform import second_runner

NUM_TOKENS, NUM_DRAFTED = 24, 3
SIZES = (1, 2, 4)  # three requests fill up the last one


def main(folder: Path) -> None:
    platform = type(current_platform)
    platform.rules = [rule for rule in platform.rules if rule.feature != "speculative decoding"]
    answers = {method: answered(folder / method, method) for method in drafting.METHODS}
    if second_runner.draft_by.bridge.needed():
        answers["graphs"] = answered(folder / "graphs", "draft_model", graphs=True)
    print(json.dumps(answers))


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


def draft_by_graphs(runner) -> Mapping[int, Mapping[int, Graph]]:
    """Let such graphs run the draft model. Returns them by a request's tokens and the number of requests."""
    from vllm_opset.platform.cuda import draft_graphs

    starts = runner.speculator.input_buffers.query_start_loc
    draft_graphs.captured = lambda run, pool, stream: (Graph(run, starts), None)
    graphs = draft_graphs.DraftGraphs(runner.speculator, SIZES, pool=None)
    second_runner.draft_by(runner.speculator, graphs.run_model)
    return graphs._graphs


def answered(folder: Path, method: str, graphs: bool = False) -> dict:
    target, draft = folder / "target", folder / "draft"
    for made in (target, draft):
        made.mkdir(parents=True)
    reference = drafting.METHODS[method](target, draft)
    prompts = models.prompts((1, 7, 40))
    expected = [models.generate(reference, prompt, NUM_TOKENS)[0] for prompt in prompts]
    with running(target, speculative_config=drafting.config(method, draft, NUM_DRAFTED)) as llm:
        captured = draft_by_graphs(runner_of(llm)) if graphs else {}
        found = tokens(generate(llm, prompts, max_tokens=NUM_TOKENS))
        counted = (counter(llm, f"spec_decode_num_{what}_tokens") for what in ("accepted", "draft"))
        accepted, drafted = counted
    replays = {tokens: {size: graph.replays for size, graph in sizes.items()} for tokens, sizes in captured.items()}
    return {"found": found, "expected": expected, "accepted": accepted / drafted, "replays": replays}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
