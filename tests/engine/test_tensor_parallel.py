"""Two workers, in processes that were forked by a plain script or spawned."""

import json
import os
import subprocess
import sys

import models
import pytest
import torch

NUM_TOKENS = 16

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none: runs on a machine with two"),
]

# No `if __name__ == "__main__"`: it must do without.
PLAIN = f"""
import json, sys, torch
(torch.randn(600, 600) @ torch.randn(600, 600)).exp().sum()  # starts OpenMP's threads
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], skip_tokenizer_init=True, dtype="float32", max_model_len=512, tensor_parallel_size=2)
params = SamplingParams(temperature=0, max_tokens={NUM_TOKENS}, ignore_eos=True, detokenize=False)
outputs = llm.generate([{{"prompt_token_ids": prompt}} for prompt in json.loads(sys.argv[2])], params)
(torch.randn(600, 600) @ torch.randn(600, 600)).exp().sum()
reports = llm.collective_rpc("opset_report")
print(json.dumps([[list(output.outputs[0].token_ids) for output in outputs], reports]))
"""
GUARDED = "def main():" + PLAIN.replace("\n", "\n    ") + '\nif __name__ == "__main__":\n    main()\n'


@pytest.mark.parametrize(
    ("script", "method"),
    [pytest.param(PLAIN, "fork", id="forked", marks=pytest.mark.window), pytest.param(GUARDED, "spawn", id="spawned")],
)
def test_two_workers(script, method, tmp_path):
    reference = models.build("qwen3", tmp_path)
    prompts = models.prompts()
    (tmp_path / "script.py").write_text(script)
    # As a user's: threads are started.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "VLLM_ENABLE_V1"))}
    environment["VLLM_WORKER_MULTIPROC_METHOD"] = method
    process = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path), json.dumps(prompts)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    answers, reports = json.loads(next(line for line in process.stdout.splitlines() if line.startswith("[[")))
    assert answers == [models.generate(reference, prompt, NUM_TOKENS)[0] for prompt in prompts]
    attention = [row for report in reports for row in report if row["op"] == "paged_attention"]
    assert ["num_heads=2, " in row["problem"] or row["problem"] for row in attention] == [True, True]
    assert "vllm_opset/" not in process.stderr, process.stderr[-4000:]
