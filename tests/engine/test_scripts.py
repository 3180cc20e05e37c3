"""Users' scripts that build an `LLM`, in whatever process vLLM puts the engine."""

import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from engines import ON_GPU
from processes import Finished, run
from readme import block

pytestmark = [pytest.mark.engine, pytest.mark.window]

# Its answer is the last line.
SCRIPT = block("python", "from vllm import LLM, SamplingParams")
if torch.cuda.is_available():
    assert "max_model_len=512" in SCRIPT
    SCRIPT = SCRIPT.replace("max_model_len=512", f"max_model_len=512, **{ON_GPU}")
# What many scripts do first. From then on OpenMP has threads, which a forked engine does not have but waits for.
USES_THREADS = """
import torch
torch.set_num_threads(4)
x = torch.randn(1024, 1024)
(x @ x).exp().sum()
"""


def guarded(script: str) -> str:
    return f'if __name__ == "__main__":\n{textwrap.indent(script, "    ")}'


# spawn imports the script again, so there, and only there, Python wants it guarded.
CASES = {
    "default": (SCRIPT, {}),
    "fork": (SCRIPT, {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}),
    "spawn": (guarded(SCRIPT), {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}),
    "in process": (SCRIPT, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All of them, two at a time where there is no GPU to fill: most of what they do is importing vLLM."""
    folder = tmp_path_factory.mktemp("scripts")

    def start(name: str, script: str, variables: dict[str, str]) -> Finished:
        path = folder / f"{name}.py"
        path.write_text(USES_THREADS + script)
        return run("python", path, OMP_NUM_THREADS=4, **variables)

    with ThreadPoolExecutor(1 if torch.cuda.is_available() else 2) as pool:
        yield {name: pool.submit(start, name, *case) for name, case in CASES.items()}


@pytest.mark.parametrize("case", CASES)
def test_a_script_that_has_used_threads(runs, case):
    finished = runs[case].result()
    assert finished.code == 0, finished
    assert any(line.strip() == "46" for line in finished.output.splitlines()), finished
