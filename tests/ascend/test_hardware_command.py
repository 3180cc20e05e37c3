"""The parts of `make test-ascend-hardware` that run without an NPU: its probes, its report, and its clean end."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import emulation
import graphs
import probes
import pytest
import run
import split_kv
import timing
import torch
from checks import DEVICES
from emulation import Limits
from report import Report, Result, Verdict
from test_faults import Faulty, the_wrong_half_activated

from vllm_opset.kernels.ascend import _constraints


@pytest.fixture(autouse=True)
def strict():
    with emulation.mode(Limits.STRICT):
        yield


def working(constant: str) -> list:
    """The candidates that work according to the probe."""
    probe = probes.PROBES[constant]
    return [candidate for candidate in probe.candidates() if probe.attempt("cpu", candidate) is None]


@pytest.mark.parametrize("constant", probes.PROBES)
def test_a_probe_finds_what_the_constant_says(constant):
    assert hasattr(_constraints, constant)
    probe = probes.PROBES[constant]
    promised = [candidate for candidate in probe.candidates() if probe.promised(candidate)]
    assert promised
    if constant == "ATB_BLOCK_TABLE_ON_HOST":  # where everything is on the host, either value works
        promised = [False, True]
    if constant == "INTERLEAVED":  # the emulation knows both names
        promised = ["interleave", "interleaved"]
    if constant == "FINALIZE_DROP_PAD_MODE":  # the emulation knows both orders
        promised = [0, 2]
    assert working(constant) == promised


@pytest.mark.parametrize(
    ("constant", "value", "works"),
    [
        ("PRE_TOKENS_EXTRA", 1, [1]),
        ("BAND_HOLDS_FOR_ONE_QUERY", False, []),
        ("ATTENTION_HEAD_SIZES", (80, 128), [80, 128]),
        ("ATTENTION_BLOCK_SIZES", (128, 256), [128, 256]),
        ("SCATTER_SLOT_DTYPES", (torch.int32,), [torch.int32]),
        ("ATB_SLOT_DTYPE", torch.int64, [torch.int64]),
        ("ATB_SKIPS_NEGATIVE_SLOTS", False, []),
        ("GATING_MAX_EXPERTS", 128, [64, 128]),
    ],
)
def test_a_probe_finds_that_a_device_is_otherwise(constant, value, works):
    """The emulation follows the constants, so other constants make it another device."""
    with patch.object(_constraints, constant, value):
        assert working(constant) == works


def test_the_probes_of_products_know_where_they_are():
    with emulation.mode(Limits.STRICT, DEVICES["310P"]):
        assert working("SCATTER_PA_KV_CACHE_SOCS") == []
        fp16 = [name for name, limits in _constraints.OPERATORS.items() if "310P" in limits.socs]
        assert [name for name in probes.CALLERS if probes.PROBES["OPERATORS"].promised(name)] == fp16


def test_an_operator_that_is_there_and_wrong_is_found():
    with Faulty("npu::npu_geglu", the_wrong_half_activated):
        assert set(probes.CALLERS) - set(working("OPERATORS")) == {"npu_geglu"}


def test_every_operator_and_every_constant_that_documents_contradict_is_probed():
    assert set(probes.CALLERS) == set(_constraints.OPERATORS)
    text = Path(_constraints.__file__).read_text()
    conflicts = text.split("# Conflict:")[1:]
    first_names = [next(line.split(" = ")[0] for line in part.splitlines() if " = " in line) for part in conflicts]
    assert set(first_names) <= set(probes.PROBES) and len(first_names) >= 6


@pytest.mark.parametrize("op", ["reshape_and_cache", "paged_attention"])
def test_the_suite_with_split_caches(op):
    found = split_kv.verdict(op, "cpu")
    assert found["why_not"] is None and found["ran"] > 20


def test_that_suite_has_the_cases_over_several_blocks(monkeypatch):
    ran = split_kv.verdict("paged_attention", "cpu")["ran"]
    monkeypatch.setattr(split_kv, "LONG", {})
    assert split_kv.verdict("paged_attention", "cpu")["ran"] < ran


def test_every_kernel_is_timed(monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 0)
    rows = list(timing.rows("cpu", lambda op, device, dtype: op.samples(device, dtype)))
    assert {f"{row['op']}={row['kernel']}" for row in rows} == set(map(str, probes.kernels()))
    assert json.dumps(rows) and all(row["us"] > 0 for row in rows)


def test_every_kernel_is_captured():
    assert set(graphs.cases()) >= {str(k) for k in probes.kernels() if k.op != "top_k_top_p_sample"}


def python(code: str, **options) -> run.Step:
    return run.Step(code, (sys.executable, "-c", code), **options)


STEPS = [
    python("print('noise'); print('{\"why_not\": null, \"ran\": 3}')"),
    python('print(\'{"why_not": "off by 3"}\')'),
    python("import sys; sys.exit('broken')"),
    python("import time; time.sleep(60)", minutes=0.01),
    python("print('2 passed')", prints_json=False),
    python("print('1 failed'); exit(1)", prints_json=False),
]


def test_every_step_is_reported_whatever_becomes_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "steps", lambda: STEPS)
    probe = python("print('\"writes nothing\"')")
    monkeypatch.setattr(run, "probe_steps", lambda: [(probe, "ATB_SLOT_DTYPE", torch.int32, True)])
    found = Report({"NPU": "2 of a kind"})
    run.examine(found, tmp_path)
    written = json.loads((tmp_path / "report.json").read_text())
    said = [result["why_not"] for result in written["results"]]
    assert said == [None, "off by 3", "exit code 1: broken", "not done in 0.01 minutes", None, "1 failed"]
    assert written["passed"] is False and written["results"][0]["found"] == {"why_not": None, "ran": 3}
    text = (tmp_path / "report.txt").read_text()
    assert "never been run on hardware" in text and "NPU: 2 of a kind" in text
    assert "CHANGE IT   ATB_SLOT_DTYPE: torch.int32 (writes nothing)" in text


def test_a_report_is_good_only_if_all_is_well():
    works, also, wrong = (Verdict("X", "1", *rest) for rest in ((True, None), (False, None), (True, "no")))
    assert Report({}, [Result("a", 1, None)], [works, also, Verdict("X", "2", False, "no")]).passed
    assert not Report({}, [Result("a", 1, "off")], [works]).passed
    assert not Report({}, [], [works, wrong]).passed
    assert [str(verdict)[:10].strip() for verdict in (works, also, wrong)] == ["as written", "also works", "CHANGE IT"]


def test_every_step_of_the_command_is_a_program_that_is_there():
    every = [step for step, *_ in run.probe_steps()] + list(run.steps())
    assert len({step.name for step in every}) == len(every) > 60
    scripts = {word for step in every for word in step.command if word.endswith(".py")}
    assert all(Path(script).exists() for script in scripts) and len(scripts) == 6


def test_the_command_says_what_is_missing_on_this_machine(tmp_path):
    """Runs as `make test-ascend-hardware` does, without the emulation. PyTorch then loads torch_npu and fails."""
    command = [sys.executable, run.__file__, str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1, done.stdout + done.stderr
    (result,) = json.loads((tmp_path / "report.json").read_text())["results"]
    assert "CANN's libascendcl.so" in result["why_not"] and "set_env.sh" in result["why_not"]
    assert result["why_not"] in done.stdout
