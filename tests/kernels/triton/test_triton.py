"""Every Triton kernel, on a machine without a GPU: correct in Triton's interpreter, and compiled for a Hopper GPU.

Triton decides at import whether it interprets, so both run in processes of their own.
"""

import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compiling import printed

from vllm_opset.kernels import triton

OPS = [module.name for module in pkgutil.iter_modules(triton.__path__) if not module.name.startswith("_")]
# Ops that take minutes or nearly so, each in a process of its own. All others share one process, which takes seconds to
# start.
ALONE = ("paged_attention", "top_k_top_p_sample", "qk_norm_rope_cache", "rope_cache", "fused_experts")
INTERPRET = str(Path(__file__).with_name("interpret.py"))
# The interpreter runs all samples of such an op in fp32. In bf16, it runs every eighth, and those that need bf16.
EVERY = 8
ON_AMPERE = """
import json, torch
from vllm_opset import ops, parity, targets
from vllm_opset.kernel import kernels_of
with targets.instead(targets.Target("nvidia", "sm80")):
    kernel, dtype = kernels_of("linear")["triton"], torch.bfloat16
    samples = [sample for sample in ops.linear.samples("cpu", dtype) if sample.name.startswith("fp8 per")]
    checks = [parity.check_sample(ops.linear, kernel, sample, dtype) for sample in samples]
print(json.dumps({check.case: check.failure or check.outcome for check in checks}))
"""
NAN_IN_FRESH_MEMORY = """
import json, torch
from vllm_opset import ops, parity
from vllm_opset.kernel import kernels_of
new_empty = torch.Tensor.new_empty
def filled(*args, **how):
    found = new_empty(*args, **how)
    return found.fill_(float("nan")) if found.dtype.is_floating_point else found
torch.Tensor.new_empty = filled
op, kernel, dtype = ops.fused_experts, kernels_of("fused_experts")["triton"], torch.bfloat16
samples = [sample for sample in op.samples("cpu", dtype) if "half of the" in sample.name or "padded" in sample.name]
checks = [parity.check_sample(op, kernel, sample, dtype) for sample in samples]
print(json.dumps({check.case: check.failure or check.outcome for check in checks}))
"""
SPILLING = """
import json, compile_only
uses = {"spilled": (0, 3, 2), "kept": (0,)}
report = {"linear": [{"kernel": kernel, "spills": number} for kernel in uses for number in uses[kernel]]}
print(json.dumps({"lines": compile_only.spilling(report, "nvidia/sm90")}))
"""
TILES = """
import json, compile_only, torch, triton
from vllm_opset import ops, targets
from vllm_opset.kernel import kernels_of
target, op = targets.Target("nvidia", "sm120"), ops.grouped_gemm
triton.runtime.driver.set_active(compile_only.CompileOnly(target))
compiled = compile_only._recorded()
with targets.instead(target):
    for sample in op.samples("cpu", torch.bfloat16):
        if sample.name.startswith("whole tiles") or "16 features" in sample.name:
            args, kwargs = sample.make()
            kernels_of(op.name)["triton"].run(*args, **kwargs)
print(json.dumps([kernel.metadata.shared for kernel in compiled]))
"""
COMPILE = str(Path(__file__).with_name("compile_only.py"))
# Fuses no product and sum unless a launch asks for it, as Triton does from 3.10 on.
LATER_TRITON = {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "0"}
PROCESSES = {op: [op] for op in ALONE} | {"others": [op for op in OPS if op not in ALONE]}

pytestmark = pytest.mark.long


def _json_of(*arguments: str, **environment: str) -> dict:
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)} | environment
    process = subprocess.run([sys.executable, *arguments], env=variables, capture_output=True, text=True)
    assert process.stdout.startswith("{"), process.stderr
    return json.loads(process.stdout)


@pytest.mark.skipif(torch.cuda.is_available(), reason="parity --device cuda does this here: runs where there is no GPU")
@pytest.mark.parametrize("ops", PROCESSES.values(), ids=PROCESSES)
def test_kernels_keep_their_contracts_in_the_interpreter(ops):
    every = EVERY if ops[0] in ALONE else 1
    checks = _json_of(INTERPRET, *ops, "--every", str(every), TRITON_INTERPRET="1")["checks"]
    assert {check["op"] for check in checks if check["skipped"] is None} == set(ops), "not one sample of an op was run"
    unsupported = {check["skipped"] for check in checks if "cpu/" in (check["skipped"] or "")}
    assert not unsupported, "the interpreter stands in for a GPU, whatever the CPU supports"
    failures = [" ".join(map(check.get, ("op", "dtype", "case", "failure"))) for check in checks if check["failure"]]
    assert not failures, "\n".join(failures)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter: runs where there is no GPU")
def test_fp8_is_widened_for_a_gpu_that_does_not_multiply_it():
    """The interpreter stands in for a Hopper GPU otherwise, which does."""
    outcomes = _json_of("-c", ON_AMPERE, TRITON_INTERPRET="1")
    assert len(outcomes) > 3 and set(outcomes.values()) == {"passed"}, outcomes


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter: runs where there is no GPU")
def test_nothing_reads_the_rows_of_absent_experts():
    """No kernel writes them, either. So they hold what memory held before."""
    outcomes = _json_of("-c", NAN_IN_FRESH_MEMORY, TRITON_INTERPRET="1")
    assert len(outcomes) > 3 and set(outcomes.values()) == {"passed"}, outcomes


@pytest.mark.skipif(torch.cuda.is_available(), reason="the samples of the contract are run on the GPU")
def test_forced_splits_and_variants_in_the_interpreter():
    """Runs, in a process of their own, the tests that need Triton to be imported as an interpreter."""
    names = ("test_paged_attention_splits.py", "test_sampling_variants.py")
    paths = [str(Path(__file__).with_name(name)) for name in names]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 0 and " passed" in process.stdout and "skipped" not in process.stdout, process.stdout


@pytest.mark.parametrize("target", ["nvidia/sm120", "amd/gfx942"])
def test_kernels_compile_for_gpus_of_other_vendors_and_generations(target, tmp_path):
    """A sample of them. `make compile-all` compiles every op for every target."""
    ops = ("rms_norm", "reshape_and_cache")
    compiled = _json_of(COMPILE, "--target", target, *ops, TRITON_CACHE_DIR=str(tmp_path), **LATER_TRITON)
    assert {(kernel["spills"], kernel["fused"]) for op in ops for kernel in compiled[op]} == {(0, True)}


def test_the_largest_and_the_smallest_tiles_of_experts_compile_for_consumer_gpus(tmp_path):
    """Triton refuses a tile of more shared memory than these have, and one of fewer columns than a product takes.

    Unquantised tiles of models' weights are as large as launch.yaml allows.
    """
    *whole, small = printed(TILES, tmp_path)
    assert len(whole) == 2 and min(whole) > 48 * 1024 > small, "a sample's tile is smaller than a model's"


def test_a_kernel_that_spills_is_named():
    (line,) = _json_of("-c", SPILLING)["lines"]
    assert line.startswith("linear: spilled uses spilled registers 3 times on nvidia/sm90")


@pytest.mark.parametrize("by_types", [True, False])
def test_a_variant_that_does_not_compile_is_asked_for_again(by_types):
    """Up to Triton 3.6, the next launch asks anew for a variant that did not compile in another thread."""
    import compile_only

    refuses = compile_only._refuses_after(1, by_types)
    kernel, of = SimpleNamespace(name="kernel"), {"signature": {"x": "*bf16"}}
    assert [refuses(key=key, fn=kernel, compile=of) for key in ("1", "2", "1")] == [False, True, False]
    assert refuses(key="3", fn=kernel, compile={"signature": {"x": "*fp32"}}) is not by_types


def test_kernels_compile_for_hopper_without_spilling(tmp_path):
    """Compiles variants that the ops' samples use. Triton's cache is empty, so each is compiled.

    The first variant of a kernel must do here. `make compile-tritons` compiles three of each kernel, and all of the ops
    with kernels in Gluon; `make compile-all` compiles those of every op.
    """
    compiled = _json_of(COMPILE, "--at-most", "1", TRITON_CACHE_DIR=str(tmp_path), **LATER_TRITON)
    assert compiled.keys() == set(OPS)
    kernels = {op: {variant["kernel"] for variant in compiled[op]} for op in OPS}
    assert "attend_prefill_sm90" in kernels["paged_attention"], "no sample is for the kernel in Gluon"
    assert "_multiply_ring" in kernels["linear"], "no sample is for int4's kernel in Gluon"
    spilling = [variant for op in OPS for variant in compiled[op] if variant["local"] or variant["spills"]]
    assert not spilling, "registers are spilled to memory"
    unfused = {variant["kernel"] for op in OPS for variant in compiled[op] if not variant["fused"]}
    assert not unfused, "a launch leaves it to Triton's default whether products and sums are fused"
