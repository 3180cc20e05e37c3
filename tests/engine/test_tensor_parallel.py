"""Two workers, in processes that a plain script forked or spawned. Each has half of the experts, or of each expert."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import adapters
import models
import mxfp4
import pytest
import quantised
import rounding
import torch
from engines import ON_GPU
from transformers import PreTrainedModel

NUM_TOKENS = 16
CLOSE = 1e-3  # log-probabilities in fp32, with another order of sums
MEMORY = ON_GPU if torch.cuda.is_available() else {}

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none: runs on two"),
]

ON_GPUS = pytest.mark.skipif(not torch.cuda.is_available(), reason="quantised weights take its place: runs on two GPUs")
WITHOUT_GPUS = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU multiplies quantised weights in 8 or 16 bits alone: runs without one"
)

# The script has no `if __name__ == "__main__"`: it must work without one.
PLAIN = f"""
import json, sys, torch
(torch.randn(600, 600) @ torch.randn(600, 600)).exp().sum()  # starts OpenMP's threads
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
llm = LLM(
    sys.argv[1], skip_tokenizer_init=True, dtype="float32", max_model_len=512, tensor_parallel_size=2,
    **json.loads(sys.argv[3]), **{MEMORY}
)
prompts = [{{"prompt_token_ids": prompt}} for prompt in json.loads(sys.argv[2])]
adapters = [adapter and LoRARequest(*adapter) for adapter in json.loads(sys.argv[4])] or None
def answers(temperature):
    params = SamplingParams(
        temperature=temperature, max_tokens={NUM_TOKENS}, ignore_eos=True, detokenize=False, logprobs=0
    )
    for output in llm.generate(prompts, params, lora_request=adapters):
        ids, steps = output.outputs[0].token_ids, output.outputs[0].logprobs
        yield list(ids), [step[token].logprob for token, step in zip(ids, steps)]
greedy, drawn = list(answers(0)), list(answers(1))
(torch.randn(600, 600) @ torch.randn(600, 600)).exp().sum()
reports = llm.collective_rpc("opset_report")
print(json.dumps([greedy, drawn, reports]))
"""
GUARDED = "def main():" + PLAIN.replace("\n", "\n    ") + '\nif __name__ == "__main__":\n    main()\n'


def save_fp8(folder: Path) -> PreTrainedModel:
    quantised.save_plain(folder, quantised.FP8, "glm4_moe")
    reference = rounding.loaded(folder)
    quantised.save_compressed(folder, folder, quantised.FP8)
    return reference


# How a checkpoint is saved, arguments of the engine, and each worker's experts. GLM-4 has a dense layer too.
BY_EXPERTS = {"enable_expert_parallel": True}
GLM4 = (
    partial(models.build, "glm4_moe"),
    BY_EXPERTS,
    "scheme=none, num_experts=4, hidden_size=64, intermediate_size=48",
)
FP8 = (
    save_fp8,
    BY_EXPERTS,
    "scheme=float8_e4m3fn per row by activations as they are, num_experts=4, hidden_size=128, intermediate_size=128",
)
QWEN3 = (
    partial(models.build, "qwen3_moe"),
    {},
    "scheme=none, num_experts=8, hidden_size=64, intermediate_size=24",
)
INT4 = (
    partial(quantised.build, "qwen3_moe"),
    {},
    "scheme=uint4 1x32 with zero points by activations as they are, num_experts=8, hidden_size=128, "
    "intermediate_size=64",
)
MXFP4 = (
    mxfp4.build,
    {},
    "scheme=float4_e2m1fn_x2 1x32 by activations as they are, num_experts=8, hidden_size=96, intermediate_size=32",
)


@pytest.mark.parametrize(
    ("script", "method", "checkpoint"),
    [
        pytest.param(PLAIN, "fork", GLM4, id="forked, expert parallelism", marks=ON_GPUS),
        pytest.param(
            PLAIN, "fork", FP8, id="forked, fp8, expert parallelism", marks=[pytest.mark.window, WITHOUT_GPUS]
        ),
        pytest.param(PLAIN, "fork", INT4, id="forked, int4", marks=[pytest.mark.window, WITHOUT_GPUS]),
        pytest.param(GUARDED, "spawn", QWEN3, id="spawned", marks=ON_GPUS),
        pytest.param(GUARDED, "spawn", MXFP4, id="spawned, MXFP4", marks=WITHOUT_GPUS),
    ],
)
def test_two_workers(script, method, checkpoint, tmp_path):
    build, arguments, share = checkpoint
    reference = build(tmp_path)
    prompts = models.prompts()
    greedy, drawn, reports = answers_of(script, method, tmp_path, tmp_path, prompts, arguments)
    assert [ids for ids, _ in greedy] == [models.generate(reference, prompt, NUM_TOKENS)[0] for prompt in prompts]
    # If the workers had drawn different tokens, the next tokens would follow from a mixture of them.
    for prompt, (ids, logprobs) in zip(prompts, drawn, strict=True):
        expected = models.logprobs(reference, prompt, ids)
        torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=CLOSE)
    assert [ids for ids, _ in drawn] != [ids for ids, _ in greedy]
    assert len(reports) == 2
    for report in reports:
        for op, part in {"paged_attention": "num_heads=2, ", "fused_experts": share}.items():
            problems = [row["problem"] for row in report if row["op"] == op]
            assert problems and all(part in problem for problem in problems), problems


@pytest.mark.window
@WITHOUT_GPUS
def test_two_workers_with_adapters(tmp_path):
    """Each has a part of the products of an adapter."""
    adapted, choices = adapters.Adapted(tmp_path), [0, 1, 2, 1, 2, 0]
    requests = [adapted.requests[choice] for choice in choices]
    asked = [request and (request.lora_name, request.lora_int_id, request.lora_path) for request in requests]
    arguments = {"enable_lora": True, "max_loras": 2, "fully_sharded_loras": True}
    greedy, _, _ = answers_of(PLAIN, "fork", tmp_path, adapted.model, adapted.prompts, arguments, asked)
    assert [ids for ids, _ in greedy] == adapted.expected(choices)


def answers_of(
    script: str,
    method: str,
    folder: Path,
    model: Path,
    prompts: list[list[int]],
    arguments: dict,
    requests: Sequence[tuple | None] = (),
) -> list:
    """What the script prints: greedy answers, drawn ones, and the workers' reports. It is written to the folder.

    method: by which processes are started. requests: the arguments of each prompt's LoRARequest, or None.
    """
    (folder / "script.py").write_text(script)
    # Like a user's environment: threads are started.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "VLLM_ENABLE_V1"))}
    environment["VLLM_WORKER_MULTIPROC_METHOD"] = method
    if method == "spawn":  # each spawned process imports vLLM for ten seconds, so the engine has none of its own
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    process = subprocess.run(
        [sys.executable, str(folder / "script.py"), str(model), *map(json.dumps, (prompts, arguments, requests))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    # This includes any process that ends after the answers.
    assert "Traceback" not in process.stderr and "vllm_opset/" not in process.stderr, process.stderr[-4000:]
    return json.loads(next(line for line in process.stdout.splitlines() if line.startswith("[[[")))
