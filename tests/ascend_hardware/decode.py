"""decode.py: compares the tokens of a random model with graphs of decode steps and without. Never run on hardware.

Requests end one after the other, so that batches are padded to the captured sizes. Prints one line of JSON: the reason
why it does not work, or null.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "engine"))

import models

LENGTHS = (1, 40, 127, 300)  # of prompts: within a block of 128, at its end, and beyond several
NUM_TOKENS = (6, 12, 18, 24)
GRAPHS = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 4]}
SETTINGS = {"dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 4, "gpu_memory_utilization": 0.2}


def why_not() -> str | None:
    os.environ |= {"OPSET_PLATFORM": "npu", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        models.build("qwen3", Path(folder), head_dim=64)
        wanted, got = tokens(folder), tokens(folder, compilation_config=GRAPHS)
    pairs = zip(LENGTHS, wanted, got, strict=True)
    others = [
        f"{length} tokens: {with_graphs}, not {want}" for length, want, with_graphs in pairs if with_graphs != want
    ]
    return "; ".join(others) or None


def tokens(folder: str, **arguments) -> list[list[int]]:
    from vllm import LLM, SamplingParams

    llm = LLM(folder, skip_tokenizer_init=True, **SETTINGS, **arguments)
    asked = [{"prompt_token_ids": prompt} for prompt in models.prompts(LENGTHS)]
    greedy = [
        SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False) for count in NUM_TOKENS
    ]
    answers = [list(output.outputs[0].token_ids) for output in llm.generate(asked, greedy, use_tqdm=False)]
    llm.llm_engine.engine_core.shutdown()  # otherwise the next engine finds its memory taken
    return answers


if __name__ == "__main__":
    print(json.dumps(why_not()))
