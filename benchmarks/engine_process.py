"""One vLLM engine behind a pipe: what the serving benchmark runs in each engine's own environment.

Started with the engine's arguments as JSON in argv[1]. Reads one request a line, {"prompts": [[token ids]],
"max_tokens", "detokenize"}, and answers with one line, {"seconds", "tokens"}. Needs vLLM alone: it runs where this
project is not installed.
"""

import json
import os
import sys
import time

# vLLM logs to stdout; the answers get the original one to themselves.
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)


def serve(engine_args: dict) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(**engine_args)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        sampling = SamplingParams(
            temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=request["detokenize"]
        )
        begin = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers)


# Engines that are spawned import this file again.
if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
