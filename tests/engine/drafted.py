"""drafted.py FOLDER: prints as JSON what an engine on a CPU answers with each method of drafting, and what is right.

opset refuses drafts on a CPU, because no functions of its own replace vLLM's Triton kernels for them. Here Triton's
interpreter runs these kernels, which takes TRITON_INTERPRET=1 and an empty CUDA_VISIBLE_DEVICES. All else is as with
vLLM's second model runner on a GPU: the copies of the configuration, the models' layers and the metadata.
"""

import json
import sys
from pathlib import Path

import drafting
import models
from engines import counter, generate, running, tokens
from vllm.platforms import current_platform

NUM_TOKENS, NUM_DRAFTED = 24, 3


def main(folder: Path) -> None:
    platform = type(current_platform)
    platform.rules = [rule for rule in platform.rules if rule.feature != "speculative decoding"]
    print(json.dumps({method: answered(folder / method, method) for method in drafting.METHODS}))


def answered(folder: Path, method: str) -> dict:
    target, draft = folder / "target", folder / "draft"
    for made in (target, draft):
        made.mkdir(parents=True)
    reference = drafting.METHODS[method](target, draft)
    prompts = models.prompts((1, 7, 40))
    expected = [models.generate(reference, prompt, NUM_TOKENS)[0] for prompt in prompts]
    with running(target, speculative_config=drafting.config(method, draft, NUM_DRAFTED)) as llm:
        found = tokens(generate(llm, prompts, max_tokens=NUM_TOKENS))
        counted = (counter(llm, f"spec_decode_num_{what}_tokens") for what in ("accepted", "draft"))
        accepted, drafted = counted
    return {"found": found, "expected": expected, "accepted": accepted / drafted}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
