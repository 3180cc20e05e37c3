"""`vllm-opset bench e2e`: a dry run of the command with engines on a CPU."""

import importlib.util
import json
import sys
from pathlib import Path

import psutil
import pytest
from processes import run
from readme import ROOT
from typer.testing import CliRunner

from vllm_opset.bench import engines, shapes
from vllm_opset.bench.compare import ComparisonPlan
from vllm_opset.bench.compare_report import Report, page, record
from vllm_opset.bench.engines import engine_adapters
from vllm_opset.cli import app
from vllm_opset.cli.e2e import _engines

GIB = 2**30

# Compiles a kernel for a GPU that may be absent; the second time, Triton finds it in its cache.
COMPILES = """
import engine_probe, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def doubled(x):
    tl.store(x, 2 * tl.load(x))

for _ in range(2):
    triton.compile(ASTSource(doubled, {"x": "*fp32"}), target=GPUTarget("cuda", 90, 32))
print(*engine_probe._compiled)
"""

# The report of an engine that is up.
NOTHING_STARTED = {"versions": {}, "platform": "none", "device": None, "compiled": []}

# An engine that never ends, with a process of its own. That one holds much memory, so its end takes time after SIGKILL.
STUBBORN = f"""
import os, time
reads, writes = os.pipe()
if not os.fork():
    memory = b"1" * {GIB}
    os.write(writes, b"1")
    time.sleep(1000)
os.read(reads, 1)
print({json.dumps(json.dumps(NOTHING_STARTED))}, flush=True)
time.sleep(1000)
"""

# An engine that compiles a kernel in so many of its first answers.
COMPILING = f"""
import json, os, sys
print({json.dumps(json.dumps(NOTHING_STARTED))}, flush=True)
for number, line in enumerate(sys.stdin):
    compiled = ["a kernel"] if number < int(os.environ["ANSWERS"]) else []
    tokens = [[0]] * len(json.loads(line)["prompts"])
    print(json.dumps(dict(seconds=1 + number, tokens=tokens, steps=1, compiled=compiled, peak_bytes=0)), flush=True)
"""


def command(*words: str, **variables: object):
    return run("vllm-opset", "bench", "e2e", *words, COLUMNS=200, OMP_NUM_THREADS=1, **variables)


def command_here(*words: str):
    """Runs in this process a command that ends before an engine starts."""
    return CliRunner().invoke(app, ["bench", "e2e", *words])


def test_an_engine_inherits_no_setting_and_finds_its_own_packages_first(tmp_path, monkeypatch):
    for name in ("VLLM_USE_V1", "OPSET_KERNELS", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    stock = engines.Engine("stock", env={"OPSET_PLATFORM": "off"}, site=tmp_path)
    ours = engines.environment(stock, {"TRITON_CACHE_DIR": "cache"})
    assert not ours.keys() & {"VLLM_USE_V1", "OPSET_KERNELS", "OMP_NUM_THREADS"}
    assert {"VLLM_USE_V1", "OPSET_KERNELS", "OMP_NUM_THREADS"} <= set(engines.not_inherited())
    assert ours["PYTHONPATH"] == f"{tmp_path}:elsewhere"
    assert (ours["OPSET_PLATFORM"], ours["TRITON_CACHE_DIR"]) == ("off", "cache")


@pytest.mark.parametrize("name", ["qwen3-8b", "gemma-2-9b"])
def test_vllm_loads_the_adapters_of_a_benchmark(name, tmp_path):
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    config = shapes.load(name).config | {"num_hidden_layers": 2}
    engine_adapters.write(config, tmp_path)
    peft = PEFTHelper.from_local_dir(str(tmp_path), max_position_embeddings=None)
    expected = {"q_proj", "k_proj", "v_proj", "o_proj"}
    model = LoRAModel.from_local_checkpoint(str(tmp_path), expected, peft, device="cpu")
    assert set(model.loras) == {f"model.layers.{layer}.self_attn.{name}" for layer in range(2) for name in expected}
    heads, hidden = config["num_attention_heads"] * config["head_dim"], config["hidden_size"]
    output = model.loras["model.layers.1.self_attn.o_proj"]
    assert output.lora_a.shape == (engine_adapters.RANK, heads)
    assert output.lora_b.shape == (hidden, engine_adapters.RANK)


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed: runs where it is")
def test_kernels_that_triton_compiles_or_finds_are_counted(tmp_path):
    script = tmp_path / "compiles.py"
    script.write_text(COMPILES)
    finished = run(sys.executable, script, PYTHONPATH=engines.CHILD.parent, TRITON_CACHE_DIR=tmp_path)
    assert finished.out.split() == ["doubled", "doubled"], finished.output


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--model", "qwen8b"), "did you mean 'qwen3-8b'?"),
        (("--model", "tiny", "--case", "5x*"), "tiny has 1x64/32"),
        (("--model", "tiny", "--case", "1x*", "--case", "5x*"), "no case matches 5x*"),
        (("--model", "tiny", "--against", "stok"), "did you mean 'stock'?"),
        (("--model", "tiny", "--against", "stock=/no/such/folder"), "/no/such/folder"),
        (("--model", "tiny", "--variant", 'opset={"adapters": 0}'), "adapters must be a number from 1 on, not 0"),
        (("--model", "tiny", "--against", "stock"), "this vLLM has no compiled kernels; name the folder"),
        (("--model", "tiny", "--markdown", "/no/such/folder/page.md"), "/no/such/folder"),
        ((), "name a shape: one of"),
        (("--from", str(ROOT / "docs" / "benchmarks" / "h200.json")), "no results of this command"),
        (("--model", "tiny", "--from", "results.json"), "--from measures nothing: leave out --model"),
        (("--warm", "--logs", "x", "--from", "results.json"), "leave out --cold/--warm, --logs"),
        (("--from", "no/such.json"), "cannot read no/such.json"),
        (("--model", "tiny", "--logs", __file__), "test_e2e.py is no folder"),
        (("--model", "tiny", "--variant", 'a={"site": 5}'), "a: site must be a folder, not 5"),
        (("--model", "tiny", "--apart", "--at-once"), "only one engine is up at a time"),
        (("--model", "tiny", "--variant", "eager=enforce_eager"), "not JSON"),
        (("--model", "tiny", "--variant", "eager=1"), "not a JSON object"),
        (("--model", "tiny", "--variant", "a/b={}"), "'a/b' is no name"),
        (("--model", "tiny", "--variant", 'eager={"env": 1}'), "env must be strings by name"),
        (("--model", "tiny", "--variant", 'eager={"env": {"A": 1}}'), "env must be strings by name"),
    ],
)
def test_wrong_words_are_errors_with_a_hint(words, hint):
    result = command_here(*words)
    assert result.exit_code == 2 and hint in " ".join(result.output.replace("│", "").split())


@pytest.mark.parametrize("env", [{}, {"OPSET_PLATFORM": "native"}])
def test_an_engine_named_stock_is_vllm_without_the_plugin_unless_its_variables_say_otherwise(env):
    (opset, stock) = _engines([], [f"stock={json.dumps({'max_num_seqs': 4, 'env': env})}"])
    assert (opset.name, stock.name, stock.args) == ("opset", "stock", {"max_num_seqs": 4})
    assert stock.env == {"OPSET_PLATFORM": "off"} | env and not opset.env


@pytest.mark.engine
def test_two_engines_side_by_side(tmp_path):
    files = {name: tmp_path / name for name in ("results.json", "page.md", "logs")}
    outputs = ("--json", files["results.json"], "--markdown", files["page.md"], "--logs", files["logs"])
    outputs += ("--conditions", "other tests run")
    # Uses another batch size, and vLLM in one process. The tokens are the same, because no request depends on the
    # others.
    again = {"max_num_seqs": 4, "env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}}
    wanted = ("--model", "tiny", "--case", "8x*", "--case", "trace*", "--repetitions", "2", "--warm", "--at-once")
    wanted += ("--rate", "40", "--requests", "12", "--variant", f"again={json.dumps(again)}")
    finished = command(*wanted, *outputs)
    assert finished.code == 0, finished.output
    assert "8x64/32 sampled" in finished.out and "again to opset" in finished.out

    (report,) = json.loads(files["results.json"].read_text())
    assert [engine["name"] for engine in report["engines"]] == ["opset", "again"]
    for engine in report["engines"]:
        assert engine["platform"].endswith("OpsetCpuPlatform") and engine["versions"]["vllm"]
        assert engine["seconds"] > 1 and 0 < engine["peak_bytes"] < 8 * GIB
    assert report["shape"]["config"]["hidden_size"] == 192 and report["machine"].endswith("GiB")
    greedy, again_greedy, sampled, again_sampled, *traces, arriving, again_arriving = report["results"]
    assert greedy["same"] == again_greedy["same"] == 8
    assert sampled["case"]["sampling"]["top_k"] == 50 and again_sampled["same"] is None
    for result in report["results"]:
        assert result["first"]["compiled"] == [], "there is nothing to compile on a CPU"
        metrics = {"batch": 4, "rate": 7, "trace": 2}
        kind = next(kind for kind in metrics if kind in result["case"])
        assert [len(values) for values in result["metrics"].values()] == [2] * metrics[kind]
        assert len(result["runs"]) == 2
        assert all(kind != "batch" or 0 < one["ttft"] < one["total"] for one in result["runs"])
    assert [(trace["case"]["trace"], trace["same"]) for trace in traces] == [(24, None)] * 2
    for result in (arriving, again_arriving):
        for one in result["runs"]:
            latencies = one["latencies"]
            # The last request arrives after 12 / 40 seconds.
            assert 0 < latencies["TTFT p50, ms"] < latencies["TTFT p99, ms"] < 1e3 * one["total"] and one["total"] > 0.3
            assert 0 < latencies["TPOT p50, ms"] < latencies["TPOT p99, ms"] < 1e3 * one["total"]
            assert latencies["ITL p99, ms"] > latencies["TPOT p50, ms"]

    text = files["page.md"].read_text()
    assert "All engines started at the same time" in text
    assert report["command"] in text and str(tmp_path) not in text and "other tests run" not in report["command"]
    assert "| 8x64/32 | TTFT, s |" in text and "8 of 8" in text and "other tests run" in text
    assert {file.name for file in files["logs"].iterdir()} == {"opset.log", "again.log"}
    assert "max_num_seqs=4" in text and "| trace of 24, up to 64/32 | output tokens/s |" in text
    assert "| 12 requests at 40/s, up to 64/32 | TTFT p50, ms |" in text and "|  | ITL p99, ms |" in text


@pytest.mark.engine
def test_one_engine_at_a_time_and_what_was_done_before_an_interruption(tmp_path):
    steps, up, names = [], [], ("opset", "again")

    def look(step: str) -> None:
        if step.startswith("8x64/32") and step.endswith("again"):
            raise KeyboardInterrupt
        steps.append(step)
        up.append(sum(str(engines.CHILD) in process.cmdline() for process in psutil.Process().children()))

    shape = shapes.load("tiny")
    # In one process, an engine imports vLLM once.
    compared = [engines.Engine(name, {}, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}) for name in names]
    plan = ComparisonPlan(shape, shape.cases[:2], compared, repetitions=1, cold=False, apart=True)
    found = plan.run(tmp_path, tmp_path, look)
    report = Report(record(plan, found, "the command"))
    first, second = ([f"{case}, run {number} of 1" for number in range(2)] for case in ("1x64/32", "8x64/32"))
    assert steps == [
        *("starting opset", *(f"{run}: opset" for run in (*first, *second))),
        *("starting again", *(f"{run}: again" for run in first)),
    ]
    assert up == [0, 1, 1, 1, 1, 0, 1, 1]
    assert [(result.engine, result.case.name) for result in found.results] == [(name, "1x64/32") for name in names]
    assert report.run["missing"] == ["8x64/32"] and found.results[1].same == 1
    text = page([report], [], None)
    assert "one engine was up at a time" in text and "Interrupted before 8x64/32." in text
    assert not [process for process in psutil.process_iter() if _writes_to(process, tmp_path)]


def test_an_engine_that_does_not_end_by_itself_is_ended(tmp_path, monkeypatch):
    child = tmp_path / "child.py"
    child.write_text(STUBBORN)
    monkeypatch.setattr(engines, "CHILD", child)
    monkeypatch.setattr(engines, "PATIENCE", 0.1)
    with engines.RunningEngine(engines.Engine("stubborn"), {}, tmp_path) as engine:
        assert engine.started.platform == NOTHING_STARTED["platform"]
    assert not [process for process in psutil.process_iter() if _writes_to(process, tmp_path)]


@pytest.mark.parametrize(("answers", "attempt"), [(3, 1), (7, 3), (100, 3)], ids=["first", "third", "never"])
def test_a_run_that_compiled_kernels_is_repeated_up_to_three_times(answers, attempt, tmp_path, monkeypatch):
    child = tmp_path / "child.py"
    child.write_text(COMPILING)
    monkeypatch.setattr(engines, "CHILD", child)
    shape = shapes.load("tiny")
    rounds = len(shape.cases[0].rounds(shape.text_config["vocab_size"]))
    compiling = engines.Engine("compiling", env={"ANSWERS": str(answers)})
    plan = ComparisonPlan(shape, shape.cases[:1], [compiling], repetitions=1, cold=False)
    (result,) = plan.run(tmp_path, tmp_path, lambda _: None).results
    assert result.first.total == rounds, "the uncounted run is not repeated"
    assert result.runs[0].total == (1 + attempt) * rounds
    assert bool(result.runs[0].compiled) == (answers == 100)


def test_no_engine_is_waited_for_after_one_that_does_not_start(tmp_path, monkeypatch):
    child = tmp_path / "child.py"
    child.write_text("import os, time\nos.environ.get('FAILS') or time.sleep(1000)")
    monkeypatch.setattr(engines, "CHILD", child)
    wanted = [engines.Engine("slow"), engines.Engine("broken", env={"FAILS": "1"})]
    plan = ComparisonPlan(
        shapes.load("tiny"), shapes.load("tiny").cases[:1], wanted, repetitions=1, cold=False, at_once=True
    )
    with pytest.raises(engines.EngineError, match="broken ended"):
        plan.run(tmp_path, tmp_path, lambda _: None)
    assert not [process for process in psutil.process_iter() if _writes_to(process, tmp_path)]


def test_an_engine_that_is_interrupted_before_its_process_exists_does_not_start(tmp_path, monkeypatch):
    """Another engine may end while the process of this one is being made."""
    started = {"versions": {}, "platform": "", "device": None, "compiled": []}
    child = tmp_path / "child.py"
    child.write_text(f"import time\nprint({json.dumps(started)!r}, flush=True)\ntime.sleep(60)")
    monkeypatch.setattr(engines, "CHILD", child)
    running = engines.RunningEngine(engines.Engine("late"), {}, tmp_path)
    running.interrupt()
    with pytest.raises(engines.EngineError, match="late ended"), running:
        pass
    assert not [process for process in psutil.process_iter() if _writes_to(process, tmp_path)]


def test_cases_that_were_done_before_an_engine_ended_are_reported(tmp_path, monkeypatch):
    child, results = tmp_path / "child.py", tmp_path / "results.json"
    # It ends after the first case, whose two repetitions have three rounds each.
    child.write_text(COMPILING.replace("steps=1", "steps=2") + "    if number == 5: sys.exit('out of memory')")
    monkeypatch.setattr(engines, "CHILD", child)
    words = ("--variant", 'opset={"env": {"ANSWERS": "0"}}', "--repetitions", "1", "--case", "1x*", "--case", "8x64/32")
    finished = command_here("--model", "tiny", *words, "--json", str(results))
    assert finished.exit_code == 1 and "opset ended" in finished.stderr and "out of memory" in finished.stderr
    (report,) = json.loads(results.read_text())
    assert [result["case_name"] for result in report["results"]] == ["1x64/32"]
    assert report["missing"] == ["8x64/32"]


def test_an_interruption_before_all_engines_have_done_a_case_is_no_report(tmp_path, monkeypatch):
    def interrupt(step: str) -> None:
        raise KeyboardInterrupt

    shape = shapes.load("tiny")
    plan = ComparisonPlan(shape, shape.cases[:1], [engines.Engine("opset")], repetitions=1, cold=False, apart=True)
    with pytest.raises(KeyboardInterrupt):
        plan.run(tmp_path, tmp_path, interrupt)


def test_the_command_says_that_it_was_interrupted_before_a_case_was_done(monkeypatch):
    def interrupt(*_) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ComparisonPlan, "run", interrupt)
    finished = CliRunner().invoke(app, ["bench", "e2e", "--model", "tiny"])
    assert finished.exit_code == 130 and "Ended before all engines had answered a case." in finished.stderr


def test_an_engine_that_fails_ends_the_command_with_its_log_and_leaves_no_process(tmp_path):
    """The first failing engine ends the command: starting another would take as long as the rest of the test."""
    broken = 'opset={"no_such_argument": 1}'
    finished = command("--model", "tiny", "--warm", "--variant", broken, "--logs", tmp_path)
    assert finished.code == 1, finished.output
    assert "opset ended" in finished.err and "no_such_argument" in finished.err
    assert not [process for process in psutil.process_iter() if _writes_to(process, tmp_path)]


def _writes_to(process: psutil.Process, folder: Path) -> bool:
    try:
        return any(Path(file.path).is_relative_to(folder) for file in process.open_files())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False  # it ended meanwhile, or is another user's
