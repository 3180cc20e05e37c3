"""Every Triton kernel, on a machine without a GPU: right in Triton's interpreter, and compiled for a Hopper GPU.

Triton decides at import whether it interprets, so both happen in processes of their own: two at a time, as these are
among the longest tests there are.
"""

import json
import os
import pkgutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from vllm_opset.kernels import triton

OPS = [module.name for module in pkgutil.iter_modules(triton.__path__) if not module.name.startswith("_")]
PARITY = "from vllm_opset.cli import main; main()"


def _json_of(*arguments: str, **environment: str) -> dict:
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)} | environment
    process = subprocess.run([sys.executable, *arguments], env=variables, capture_output=True, text=True)
    assert process.stdout.startswith("{"), process.stderr
    return json.loads(process.stdout)


@pytest.fixture(scope="session")
def interpreted() -> list[dict]:
    """All checks of parity, in the interpreter."""
    arguments = ("-c", PARITY, "parity", *OPS, "--kernel", "triton", "--device", "cpu", "--jobs", "2", "--json")
    return _json_of(*arguments, TRITON_INTERPRET="1")["checks"]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory) -> dict[str, list[dict]]:
    """The variants of each op's kernels that its samples ask for."""
    script, cache = Path(__file__).with_name("compile_only.py"), tmp_path_factory.mktemp("triton")

    def compile_for(ops: list[str]) -> dict[str, list[dict]]:
        return _json_of(str(script), *ops, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(cache))

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(compile_for, (OPS[::2], OPS[1::2]))
    return first | second


@pytest.mark.skipif(torch.cuda.is_available(), reason="parity --device cuda does this here: runs where there is no GPU")
@pytest.mark.parametrize("op", OPS)
def test_kernel_keeps_its_contract_in_the_interpreter(op, interpreted):
    checks = [check for check in interpreted if check["op"] == op]
    assert any(check["skipped"] is None for check in checks), "not one sample was run"
    failures = [f"{check['dtype']} {check['case']}: {check['failure']}" for check in checks if check["failure"]]
    assert not failures, "\n".join(failures)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the samples of the contract are run on the GPU")
def test_attention_shares_keys_out_in_the_interpreter():
    """Tests that Triton has to be imported as an interpreter for, in a process of their own."""
    path = Path(__file__).with_name("test_paged_attention_shares.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 0 and " passed" in process.stdout and "skipped" not in process.stdout, process.stdout


@pytest.mark.parametrize("op", OPS)
def test_kernel_compiles_for_hopper_without_spilling(op, compiled):
    kernels = {variant["kernel"] for variant in compiled[op]}
    assert "attend_many_on_hopper" in kernels or op != "paged_attention", "no sample is for the kernel in Gluon"
    for variant in compiled[op]:
        assert variant["local"] == variant["spills"] == 0, f"registers are spilled to memory: {variant}"
