"""Writes as JSON an engine's answers to prompts that repeat themselves, so that n-grams draft tokens for them.

Its arguments are JSON, the arguments of LLM; the number of prompts; and the file to write.
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams

LENGTH, PERIOD = 200, 5


def main(arguments: dict, num_reqs: int, file: Path) -> None:
    llm = LLM(enable_prefix_caching=False, **arguments)
    prompts = [{"prompt_token_ids": [(i + j % PERIOD) % 256 for j in range(LENGTH)]} for i in range(num_reqs)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    file.write_text(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
