"""answering.py FOLDER ARGUMENTS: prints as JSON the answers of an engine, and the kernels that computed its experts.

ARGUMENTS is JSON: arguments of LLM. The platform comes from the environment.
"""

import json
import sys
from pathlib import Path

import models
from engines import generate, running, served


def main(folder: str, arguments: str) -> None:
    with running(Path(folder), dtype="bfloat16", **json.loads(arguments)) as llm:
        outputs = generate(llm, models.prompts((1, 7, 40)), max_tokens=16, logprobs=5)
        kernels = sorted(served(llm)["fused_experts"])
    answers = [
        {
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [
                {token: found.logprob for token, found in step.items()} for step in output.outputs[0].logprobs
            ],
        }
        for output in outputs
    ]
    print(json.dumps({"kernels": kernels, "answers": answers}))


if __name__ == "__main__":
    main(*sys.argv[1:])
