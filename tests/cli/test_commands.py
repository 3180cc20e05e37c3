"""`vllm-opset ops`, `parity` and `demo`, as a user runs them."""

import json
import re
import shlex
import sys
import time
import tomllib

import pytest
from commands import command
from processes import run
from readme import ROOT, block

from vllm_opset import devices, kernel, ops
from vllm_opset.cli import arguments, demo, parity
from vllm_opset.cli.parity import OUTCOMES
from vllm_opset.kernel import kernels_of
from vllm_opset.parity import Check

# A kernel that parity must reject, and one that states its limits.
USERS_KERNELS = """
import torch
from vllm_opset import ops
from vllm_opset.kernel import kernel

def supports(problem):
    '''Only float32.'''
    return None if problem.dtype is torch.float32 else "only float32"

@kernel(ops.silu_and_mul, name="wrong", supports=supports)
def silu_and_mul(x):
    return 1.001 * ops.silu_and_mul(x)
"""
# Ops of a model of this kind; some of its questions are sampled and penalised.
USED_BY_QWEN3 = {"rms_norm", "fused_add_rms_norm", "silu_and_mul"}
USED_BY_QWEN3 |= {"paged_attention", "apply_penalties", "top_k_top_p_sample"}
# Layers choose a kernel for the second pair, and call the first op instead where there is a compiler for C++.
ROPE_AND_CACHE = {"qk_norm_rope_cache"}, {"rotary_embedding", "reshape_and_cache"}


@pytest.fixture
def users_kernels(tmp_path) -> dict:
    (tmp_path / "users_kernels.py").write_text(USERS_KERNELS)
    return {"PYTHONPATH": tmp_path, "OPSET_IMPORT": "users_kernels"}


# ops


def test_ops_lists_every_kernel_of_every_op():
    rows = json.loads(command("ops", "--json").out)["kernels"]
    listed = {(row["op"], row["kernel"]) for row in rows if row["here"] == "yes"}
    here = [kernel for op in ops.ALL for kernel in kernels_of(op.name).values() if devices.run(kernel)]
    assert listed == {(kernel.op, kernel.name) for kernel in here}
    assert all(row["supports"] not in ("", "not documented") for row in rows)


def test_ops_lists_the_ops_that_are_named(command_here):
    rows = json.loads(command_here("ops", "rms_norm", "route", "rms_norm", "--json").stdout)["kernels"]
    assert {row["op"] for row in rows} == {"rms_norm", "route"}
    assert len({(row["op"], row["kernel"]) for row in rows}) == len(rows), "an op that is named twice is listed once"
    assert "did you mean 'rms_norm'?" in command_here("ops", "rmsnorm").output


def test_ops_can_be_read_in_a_terminal_of_80_columns(command_here):
    """Each kernel is below its op, and no word is cut."""
    found = command_here("ops", "gelu", "rms_norm", COLUMNS="80").stdout.partition("The kernels of")[0]
    lines = [line.rstrip() for line in found.splitlines()]
    assert max(map(len, lines)) <= 80
    assert lines[:4] == [
        "Ops and their kernels",
        "gelu",
        "  reference  devices: any; here: yes",
        "             supports: Everything in the contract.",
    ]
    assert command_here("ops", "--help").stdout.split("\n")[1].rstrip().endswith("ops [OPTIONS] [OP]...")


def test_ops_lists_the_kernels_for_other_machines_with_what_they_support(command_here):
    found = json.loads(command_here("ops", "--json").stdout)
    ascend = {f"{row['op']}={row['kernel']}": row for row in found["kernels"] if row["provider"] == "ascend"}
    assert found["unavailable"]["ascend"].startswith("torch_npu is not installed")
    assert len(ascend) == 21
    row = ascend["paged_attention=ascend_atb"]
    assert (row["devices"], row["here"]) == ("npu", "no")
    assert row["supports"].startswith("bf16 and fp16 on A2 and A3, head sizes 64 and 128, block size 128")


def test_ops_says_of_kernels_without_their_device_that_they_are_not_here(command_here, monkeypatch):
    if kernel.why_unavailable("triton"):
        pytest.skip("Triton is not installed, so it has no kernels to list: runs where it is installed")
    monkeypatch.setattr(devices, "here", lambda: ["cpu"])
    found = json.loads(command_here("ops", "--json").stdout)
    assert {row["here"] for row in found["kernels"] if row["provider"] == "triton"} == {"no"}
    assert found["unavailable"]["triton"] == "PyTorch finds no cuda device"


def test_ops_shows_a_users_kernel_with_what_it_supports(users_kernels):
    (line,) = [line for line in command("ops", **users_kernels).output.splitlines() if "wrong" in line]
    assert "silu_and_mul" in line
    assert "Only float32." in line


# parity


def test_parity_agrees_with_a_right_kernel(command_here):
    finished = command_here("parity", "silu_and_mul", "rms_norm", "--dtype", "float32", "--dtype", "bfloat16", "--json")
    assert finished.exit_code == 0, finished.output
    found = json.loads(finished.stdout)
    kernels = {(check["op"], check["kernel"]) for check in found["checks"]}
    assert kernels >= {("silu_and_mul", "cpu"), ("rms_norm", "reference")}
    assert {check["dtype"] for check in found["checks"]} == {"float32", "bfloat16"}
    assert found["failed"] == 0 < found["passed"]


# It raises KeyboardInterrupt, as Ctrl-C does, while the first of many checks run in other processes.
INTERRUPTED = """
import signal, torch
from vllm_opset.cli import parity
from vllm_opset.cli.jobs import in_processes

signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.alarm(3)
list(in_processes(parity._list_of_checks, [("paged_attention", "cpu", torch.float32, "cpu")] * 40, 2))
"""


def test_ctrl_c_ends_parity_without_the_checks_that_are_left():
    began = time.monotonic()
    finished = run(sys.executable, "-c", INTERRUPTED)
    assert "KeyboardInterrupt" in finished.err and time.monotonic() - began < 40  # and minutes with all checks


def test_parity_finds_a_wrong_kernel_out(users_kernels):
    finished = command("parity", "silu_and_mul", "--kernel", "wrong", "--jobs", "2", **users_kernels)
    assert finished.code == 1, finished.output
    assert "FAILED silu_and_mul=wrong" in finished.output
    assert "times the tolerance" in finished.output
    assert re.fullmatch(r"\d+ passed, \d+ failed, \d+ skipped", finished.out.splitlines()[-1]), finished.output


def test_parity_counts_what_a_kernel_does_not_support_apart(users_kernels):
    """The user's kernel supports one dtype of three, so two thirds of the checks have neither passed nor failed."""
    finished = command("parity", "silu_and_mul", "--kernel", "wrong", "--json", **users_kernels)
    assert finished.code == 1, finished.output
    found = json.loads(finished.out)
    outcomes = [check["outcome"] for check in found["checks"]]
    assert [found[outcome] for outcome in OUTCOMES] == [outcomes.count(outcome) for outcome in OUTCOMES]
    assert found["failed"] and found["passed"]
    assert found["skipped"] == 2 * len(outcomes) / 3


@pytest.mark.parametrize(
    ("found", "device"), [(["cpu"], "cpu"), (["cpu", "cuda"], "cuda"), (["cpu", "npu"], "npu"), (["cpu", "mps"], "cpu")]
)
def test_parity_checks_the_kernels_of_the_accelerator(found, device, command_here, monkeypatch):
    monkeypatch.setattr(arguments, "here", lambda: found)
    monkeypatch.setattr(parity, "require_device", lambda *_: None)
    monkeypatch.setattr(parity, "_checks", lambda *checked: [Check(*checked)])
    finished = command_here("parity", "rms_norm", "rms_norm", "--kernel", "reference", "--json")
    printed = json.loads(finished.stdout)
    assert printed["device"] == device and printed["passed"] == len(ops.rms_norm.dtypes)
    table = command_here("parity", "rms_norm", "--kernel", "reference").stdout
    assert table.startswith(f"Parity on {device}"), "progress is not part of the output"


@pytest.mark.parametrize("end", [KeyboardInterrupt, RuntimeError], ids=["Ctrl-C", "an exception"])
def test_at_its_end_parity_reports_what_it_has_checked(end, command_here, monkeypatch):
    """After an illegal memory access, say, every call raises. The check that saw it must not be lost."""

    def checks(*checked):
        yield Check(*checked, failure="an illegal memory access")
        raise end("no further check is possible")

    monkeypatch.setattr(parity, "_checks", checks)
    finished = command_here("parity", "rms_norm", "--kernel", "reference")
    assert finished.exit_code == 1, finished.output
    assert "FAILED rms_norm=reference" in finished.stdout and "1 failed" in finished.stdout
    assert "Ended before 3 of 3 kernels and dtypes were checked." in finished.stdout
    assert ("no further check is possible" in finished.stderr) == (end is RuntimeError)
    printed = json.loads(command_here("parity", "rms_norm", "--kernel", "reference", "--json").stdout)
    assert (printed["failed"], printed["left"]) == (1, 3)


def test_parity_of_nothing_is_an_error(command_here, monkeypatch):
    """A kernel that supports no case was not checked, whatever its name promises."""
    picky = kernel.Kernel("silu_and_mul", "picky", "tests", ("cpu",), lambda problem: "only on Sundays", print)
    kernels_of("silu_and_mul")
    monkeypatch.setitem(kernel._registry["silu_and_mul"], "picky", picky)
    finished = command_here("parity", "silu_and_mul", "--kernel", "picky")
    assert finished.exit_code == 1, finished.output
    assert "NOTHING WAS CHECKED" in finished.output and "only on Sundays" in finished.output


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (["parity", "silu_and_mull"], {}, "OP: unknown: 'silu_and_mull'; did you mean 'silu_and_mul'?"),
        (["parity", "--kernel", "mine"], {}, "no kernel named 'mine' runs on cpu"),
        (["parity", "rms_norm", "--kernel", "cp"], {}, "no kernel named 'cp' runs on cpu; did you mean 'cp"),
        (["parity", "rms_norm", "--dtype", "float61"], {}, "unknown: 'float61'; did you mean 'float16'?"),
        (["parity", "compute_slot_mapping", "--dtype", "float16"], {}, "none of the ops is checked in this dtype"),
        (["parity", "rms_norm", "permute", "--dtype", "float32"], {}, "leave nothing to check of permute"),
        (["parity", "rms_norm", "permute", "--kernel", "cpp"], {}, "leave nothing to check of permute"),
        (["parity", "rms_norm", "--device", "npu"], {}, "there is no npu here"),
        (["parity", "rms_norm", "--device", "npu"], {}, "ascend: torch_npu is not installed"),
        (["parity", "rms_norm", "--device", "gpu"], {}, "unknown: 'gpu'; known: cpu, cuda, npu; here: cpu"),
        (["bench", "rms_norm", "--device", "npu"], {}, "unknown: 'npu'; known: cpu, cuda; here: cpu"),
        (["bench", "rms_norm", "--kernel", "cpuu"], {}, "no kernel 'cpuu' runs on cpu; did you mean 'cpu'?"),
        (["demo", "--dtype", "fp16"], {}, "unknown: 'fp16'; did you mean 'float16'?"),
        (["ops"], {"OPSET_KERNELS": "rms_norm=cpuu"}, "rms_norm has no kernel 'cpuu' here; did you mean 'cpu'?"),
        (["ops"], {"OPSET_CONFIG": "nowhere.yaml"}, "cannot read nowhere.yaml"),
        (["doctor"], {"OPSET_IMPORT": "nowhere"}, "importing 'nowhere' raised ModuleNotFoundError"),
    ],
)
def test_a_wrong_word_is_an_error_that_says_what_is_known(command_here, words, variables, message):
    finished = command_here(*words, **variables)
    assert finished.exit_code == 2, finished.output
    assert message in " ".join(finished.output.replace("│", " ").split())


def test_the_readmes_commands_exist(command_here):
    for line in block("", "vllm-opset doctor").splitlines():
        program, *words = shlex.split(line, comments=True)
        assert program == "vllm-opset" and "#" in line
        assert command_here(*words, "--help").exit_code == 0


# demo


def test_demo_finds_what_a_wheel_installs(monkeypatch, tmp_path):
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    ((_, patterns),) = shipped.items()
    files = {file.name for pattern in patterns for file in ROOT.glob(pattern)}
    sources = {file.name for file in (ROOT / "examples" / "tiny-qwen3").iterdir() if file.suffix in (".py", ".md")}
    assert files == {file.name for file in (ROOT / "examples" / "tiny-qwen3").iterdir() if file.is_file()} - sources

    info = tmp_path / "vllm_opset-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-opset\nVersion: 0.1.0\n")
    (info / "RECORD").write_text("../../../share/vllm-opset/tiny-qwen3/heldout.jsonl,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(demo, "IN_CHECKOUT", tmp_path / "examples")
    assert demo._tiny() == tmp_path / "../../../share/vllm-opset/tiny-qwen3"


def test_demo_says_where_there_is_a_model(command_here, tmp_path):
    finished = command_here("demo", "--model", str(tmp_path))
    assert finished.exit_code == 2
    assert "give examples/tiny-qwen3" in " ".join(finished.output.replace("│", " ").split())


@pytest.mark.engine
def test_demo_says_in_one_error_why_the_platform_cannot_be_had():
    finished = command("demo", OPSET_PLATFORM="gpu")
    assert finished.code == 2, finished.output
    assert "OPSET_PLATFORM='gpu' is not a choice; known: auto" in finished.err
    assert "Traceback" not in finished.output


def test_demo_answers_and_counts_the_calls_of_every_op():
    finished = command("demo", "--questions", "8")
    assert finished.code == 0, finished.output
    assert "8 of 8 right" in finished.output
    assert "tokens/s" in finished.output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in finished.output.splitlines() if "│" in line]
    calls = {op: int(count.split()[0]) for op, _, count, _ in (row for row in rows if len(row) == 4)}
    called = {op for op, count in calls.items() if count}
    assert called >= USED_BY_QWEN3 and any(called >= ops for ops in ROPE_AND_CACHE)
    assert calls.keys() - called <= {"rotary_embedding"}
