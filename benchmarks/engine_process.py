"""One vLLM engine behind a pipe: what the serving benchmark runs in the environment of each engine.

argv[1]: the arguments of `LLM` as JSON. Writes {"versions"} when the engine is up. Then reads one request a line,
{"prompts": [[token id]], "max_tokens"}, and answers each with a line {"seconds", "tokens": [[token id]]}.
Needs vLLM alone: it runs where this project is not installed.
"""

import json
import os
import platform
import sys
import time


def serve(engine_args: dict, answers) -> None:
    import torch
    import vllm

    llm = vllm.LLM(**engine_args)
    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "python": platform.python_version()}
    print(json.dumps({"versions": versions}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False
        )
        begin = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers)


# A process that vLLM spawns imports this file again.
if __name__ == "__main__":
    # vLLM prints to stdout what it likes; the answers have the pipe to themselves.
    pipe = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    serve(json.loads(sys.argv[1]), pipe)
