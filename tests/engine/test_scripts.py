"""Users' scripts that build an `LLM`, in any process that vLLM chooses for the engine."""

import textwrap

import pytest
import torch
from engines import ON_GPU
from processes import run
from readme import block

pytestmark = [pytest.mark.engine, pytest.mark.window]

# The answer is the last line of its output.
SCRIPT = block("python", "from vllm import LLM, SamplingParams")
VARIABLES = {"OMP_NUM_THREADS": 4}
if torch.cuda.is_available():
    # Stock vLLM would first compile FlashInfer's sampler for minutes, or fail where FlashInfer is not installed.
    VARIABLES["VLLM_USE_FLASHINFER_SAMPLER"] = 0
    assert "max_model_len=512" in SCRIPT
    SCRIPT = SCRIPT.replace("max_model_len=512", f"max_model_len=512, **{ON_GPU}")
# Many scripts start like this. OpenMP then has threads. A forked engine lacks these threads but waits for them.
USES_THREADS = """
import torch
torch.set_num_threads(4)
x = torch.randn(1024, 1024)
(x @ x).exp().sum()
"""


def guarded(script: str) -> str:
    return f'if __name__ == "__main__":\n{textwrap.indent(script, "    ")}'


# vLLM forks by default. spawn imports the script again, so Python needs the guard there, and only there.
CASES = {
    "default": (SCRIPT, {}),
    "spawn": (guarded(SCRIPT), {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}),
    "in process": (SCRIPT, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
}


@pytest.mark.parametrize(("script", "variables"), CASES.values(), ids=CASES)
def test_a_script_that_has_used_threads(script, variables, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(USES_THREADS + script)
    finished = run("python", path, **VARIABLES, **variables)
    assert finished.code == 0, finished.output
    assert any(line.strip() == "46" for line in finished.output.splitlines()), finished.output
