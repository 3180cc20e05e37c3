"""answering.py FOLDER ARGUMENTS: prints as JSON an engine's answers, and the kernels that computed its experts.

It answers `models.prompts()`, by the tokens and their log-probabilities. ARGUMENTS is JSON: arguments of LLM. The
platform comes from the environment.
"""

import json
import sys
from pathlib import Path

import models
from engines import chosen, generate, running, served


def main(folder: str, arguments: str) -> None:
    with running(Path(folder), dtype="bfloat16", **json.loads(arguments)) as llm:
        answers = chosen(generate(llm, models.prompts(), logprobs=0))
        kernels = sorted(served(llm)["fused_experts"])
    print(json.dumps({"kernels": kernels, "answers": [(answer, found.tolist()) for answer, found in answers]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
