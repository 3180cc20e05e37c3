"""Every Triton kernel, on a machine without a GPU: right in Triton's interpreter, and compiled for a Hopper GPU.

Triton decides at import whether it interprets, so both happen in processes of their own.
"""

import functools
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_opset.kernels import triton

OPS = tuple(module.name for module in pkgutil.iter_modules(triton.__path__) if not module.name.startswith("_"))
# Ops that take minutes or nearly so. All others share a process, since each process takes seconds to start.
ALONE = ("paged_attention", "top_k_top_p_sample", "qk_norm_rope_cache", "rope_cache")
PARITY = "from vllm_opset.cli import main; main()"
COMPILE = str(Path(__file__).with_name("compile_only.py"))


def in_processes(what: str) -> list:
    """The ops as parameters. Those that share a process stay together where tests run side by side."""
    return [
        pytest.param(op, marks=[pytest.mark.long, pytest.mark.xdist_group(f"{what} {_shared(op)[0]}")]) for op in OPS
    ]


def _shared(op: str) -> tuple[str, ...]:
    """The ops that share a process with this one."""
    return (op,) if op in ALONE else tuple(other for other in OPS if other not in ALONE)


def _json_of(*arguments: str, **environment: str) -> dict:
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)} | environment
    process = subprocess.run([sys.executable, *arguments], env=variables, capture_output=True, text=True)
    assert process.stdout.startswith("{"), process.stderr
    return json.loads(process.stdout)


@functools.cache
def interpreted(ops: tuple[str, ...]) -> list[dict]:
    """All checks of parity, in the interpreter."""
    arguments = ("-c", PARITY, "parity", *ops, "--kernel", "triton", "--device", "cpu", "--json")
    return _json_of(*arguments, TRITON_INTERPRET="1")["checks"]


@functools.cache
def compiled(ops: tuple[str, ...], cache: Path) -> dict[str, list[dict]]:
    """The variants of each op's kernels that its samples ask for. cache: for Triton, empty at first."""
    return _json_of(COMPILE, *ops, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(cache))


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("triton")


@pytest.mark.skipif(torch.cuda.is_available(), reason="parity --device cuda does this here: runs where there is no GPU")
@pytest.mark.parametrize("op", in_processes("interpreted"))
def test_kernel_keeps_its_contract_in_the_interpreter(op):
    checks = [check for check in interpreted(_shared(op)) if check["op"] == op]
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


@pytest.mark.parametrize("op", in_processes("compiled"))
def test_kernel_compiles_for_hopper_without_spilling(op, cache):
    variants = compiled(_shared(op), cache)[op]
    kernels = {variant["kernel"] for variant in variants}
    assert "attend_many_on_hopper" in kernels or op != "paged_attention", "no sample is for the kernel in Gluon"
    for variant in variants:
        assert variant["local"] == variant["spills"] == 0, f"registers are spilled to memory: {variant}"
