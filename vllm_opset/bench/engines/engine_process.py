"""One vLLM engine behind a pipe. A benchmark of engines runs this file in the environment of each engine.

argv[1]: the arguments of `LLM` as JSON, and `adapters`, a number of LoRA adapters that requests take by turns.
Writes {"versions", "platform", "device", "compiled"} when the engine is up. Then it reads one request a line,
{"prompts": [[token id]], "sampling": [arguments of SamplingParams]}. It answers each with a line
{"seconds", "tokens": [[token id]], "steps", "compiled", "peak_bytes"}. Steps are those that give a request tokens,
summed over the requests. With "arrivals": [seconds], ascending, prompts are not asked at once but at their times, and
the answer has "times", [[seconds from a request's arrival to each of its outputs]].
It needs only vLLM, because it runs in environments without this project.
"""

import itertools
import json
import os
import platform
import sys
import time
from pathlib import Path


def serve(engine_args: dict, answers) -> None:
    import torch
    import vllm
    from vllm.platforms import current_platform

    # engine_adapters, engine_arrivals and engine_probe lie next to this file, in the first folder of sys.path.
    loras = None
    if adapters := engine_args.pop("adapters", 0):
        import engine_adapters

        engine_args |= engine_adapters.engine_args(adapters)
        loras = itertools.cycle(engine_adapters.requests(Path(engine_args["model"]), adapters))
    llm = vllm.LLM(**engine_args, worker_extension_cls="engine_probe.Probe")
    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "python": platform.python_version()}
    name = f"{type(current_platform).__module__}.{type(current_platform).__qualname__}"
    found = probe(llm, "device", "compiled")
    print(json.dumps({"versions": versions, "platform": name, **found}), file=answers)
    steps = Steps(llm.llm_engine.engine_core)
    for line in sys.stdin:
        request = json.loads(line)
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        sampling = [vllm.SamplingParams(**of_one, ignore_eos=True, detokenize=False) for of_one in request["sampling"]]
        lora_request = loras and list(itertools.islice(loras, len(prompts)))
        before, begin = steps.count, time.perf_counter()
        answer = _answer(llm, prompts, sampling, lora_request, request.get("arrivals"))
        seconds = time.perf_counter() - begin
        found = probe(llm, "compiled", "peak_bytes")
        print(json.dumps({"seconds": seconds, **answer, "steps": steps.count - before, **found}), file=answers)


def _answer(llm, prompts: list, sampling: list, loras: list | None, arrivals: list[float] | None) -> dict:
    """The tokens, and with arrivals the times of outputs."""
    if arrivals is None:
        outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=loras)
        return {"tokens": [list(output.outputs[0].token_ids) for output in outputs]}
    import engine_arrivals

    tokens, times = engine_arrivals.generate(llm.llm_engine, prompts, sampling, loras, arrivals)
    return {"tokens": tokens, "times": times}


class Steps:
    """Counts the steps that give a request tokens, for all requests. core: vLLM's client of its engine."""

    def __init__(self, core) -> None:
        self.count, self._get = 0, core.get_output
        core.get_output = self._counted

    def _counted(self):
        step = self._get()
        self.count += sum(bool(request.new_token_ids) for request in step.outputs)
        return step


def probe(llm, *what: str) -> dict:
    """The values of one worker: the one with the most kernels since the last probe, or else with the most memory."""
    busiest = max(
        llm.collective_rpc("benchmark_probe"), key=lambda worker: (len(worker["compiled"]), worker["peak_bytes"])
    )
    return {name: busiest[name] for name in what}


# A process that vLLM spawns imports this file again.
if __name__ == "__main__":
    # vLLM may print anything to stdout, so the answers get a pipe of their own.
    pipe = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    serve(json.loads(sys.argv[1]), pipe)
