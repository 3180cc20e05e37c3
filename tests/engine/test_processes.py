"""Engines in processes of their own: forked by a plain script, spawned, and several workers."""

import json
import os
import subprocess
import sys

import models
import pytest

NUM_TOKENS = 16

pytestmark = [pytest.mark.engine, pytest.mark.window]

# No `if __name__ == "__main__"`: it must do without.
PLAIN = f"""
import json, sys, torch
(torch.randn(600, 600) @ torch.randn(600, 600)).exp().sum()  # starts OpenMP's threads
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], skip_tokenizer_init=True, dtype="float32", max_model_len=512, **json.loads(sys.argv[2]))
params = SamplingParams(temperature=0, max_tokens={NUM_TOKENS}, ignore_eos=True, detokenize=False)
outputs = llm.generate([{{"prompt_token_ids": prompt}} for prompt in json.loads(sys.argv[3])], params)
(torch.randn(600, 600) @ torch.randn(600, 600)).exp().sum()
reports = llm.collective_rpc("opset_report")
print(json.dumps([[list(output.outputs[0].token_ids) for output in outputs], reports]))
"""
GUARDED = "def main():" + PLAIN.replace("\n", "\n    ") + '\nif __name__ == "__main__":\n    main()\n'


@pytest.mark.parametrize(
    ("script", "method", "arguments", "num_workers"),
    [
        pytest.param(PLAIN, None, {}, 1, id="forked by a plain script"),
        pytest.param(GUARDED, "spawn", {}, 1, id="spawned"),
        pytest.param(PLAIN, None, {"tensor_parallel_size": 2}, 2, id="two workers, forked"),
        pytest.param(GUARDED, "spawn", {"tensor_parallel_size": 2}, 2, id="two workers, spawned"),
    ],
)
def test_processes(script, method, arguments, num_workers, tmp_path):
    reference = models.build("qwen3", tmp_path)
    prompts = models.prompts()
    (tmp_path / "script.py").write_text(script)
    # As a user's: threads are started, and nothing is chosen for the engine.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "VLLM_ENABLE_V1"))}
    if method is not None:
        environment["VLLM_WORKER_MULTIPROC_METHOD"] = method
    process = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path), json.dumps(arguments), json.dumps(prompts)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    answers, reports = json.loads(next(line for line in process.stdout.splitlines() if line.startswith("[[")))
    assert answers == [models.generate(reference, prompt, NUM_TOKENS)[0] for prompt in prompts]
    assert len(reports) == num_workers
    attention = [row for report in reports for row in report if row["op"] == "paged_attention"]
    assert [f"num_heads={4 // num_workers}," in row["problem"] for row in attention] == [True] * num_workers
    assert "vllm_opset/" not in process.stderr, process.stderr[-4000:]
