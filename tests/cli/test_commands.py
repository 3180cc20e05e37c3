"""`vllm-opset ops`, `doctor`, `parity` and `demo`, as a user runs them."""

import json
import re
import shlex
import tomllib

import pytest
import torch
from click.testing import Result
from processes import Finished, run
from readme import ROOT, block
from typer.testing import CliRunner

from vllm_opset import devices, kernel, ops, selection
from vllm_opset.cli import app, demo, doctor
from vllm_opset.cli.parity import OUTCOMES
from vllm_opset.kernel import kernels_of
from vllm_opset.kernels.ascend import CANN_LIBRARIES

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
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
USED_BY_QWEN3 = {"rms_norm", "fused_add_rms_norm", "rotary_embedding", "silu_and_mul"}
USED_BY_QWEN3 |= {"reshape_and_cache", "paged_attention", "apply_penalties", "top_k_top_p_sample"}


def command(*words: str, **variables: object) -> Finished:
    """Runs the command in a process of its own."""
    return run("vllm-opset", *words, COLUMNS=200, OMP_NUM_THREADS=1, **variables)


@pytest.fixture
def command_here(monkeypatch):
    """Runs commands that need no vLLM in this process, which is faster: `command_here("ops", OPSET_KERNELS="…")`."""
    monkeypatch.setattr(selection, "_overrides", None)
    monkeypatch.setattr(selection, "_choices", {})
    for name in ("OPSET_PLATFORM", "OPSET_KERNELS", "OPSET_CONFIG", "OPSET_IMPORT", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")

    def command_here(*words: str, **variables: str) -> Result:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return CliRunner().invoke(app, words)

    return command_here


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


def test_ops_lists_the_kernels_for_other_machines_with_what_they_support():
    found = json.loads(command("ops", "--json").out)
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


# doctor


def test_doctor_accounts_for_every_kernel_of_every_op_for_the_device():
    finished = command("doctor", "--json")
    assert finished.code == 0, finished.output
    found = json.loads(finished.out)
    assert found["platform"] == "vllm_opset.platform.cpu.platform.OpsetCpuPlatform"
    assert found["faults"] == []
    assert found["machine"]["vllm-opset"] == PROJECT["version"]
    for op in ops.ALL:
        rows = [row for row in found["kernels"] if row["op"] == op.name]
        named = {row["kernel"] for row in rows} | {other["kernel"] for row in rows for other in row["others"]}
        assert named == set(kernels_of(op.name, device="cpu"))
        assert all(row["why"] and all(other["reason"] for other in row["others"]) for row in rows)


def test_doctor_says_why_an_override_counts():
    output = command("doctor", OPSET_KERNELS="silu_and_mul=reference").output
    (line,) = [line for line in output.splitlines() if "│ silu_and_mul " in line]
    assert "asked for by OPSET_KERNELS" in line
    assert "cpu: OPSET_KERNELS asks for reference" in line


@pytest.mark.parametrize(
    ("variables", "what", "cure"),
    [
        ({"OPSET_PLATFORM": "off"}, "OPSET_PLATFORM=off", "unset OPSET_PLATFORM"),
        ({"VLLM_PLUGINS": "other"}, "VLLM_PLUGINS='other' leaves it out", "add opset to it"),
        ({"VLLM_TARGET_DEVICE": "cpu"}, "VLLM_TARGET_DEVICE=cpu", "unset VLLM_TARGET_DEVICE"),
        ({"OPSET_NUM_THREADS": "0"}, "neither a number of threads nor 'auto'", "Set it to one of these, or unset it"),
        ({"OPSET_NATIVE": "sampler"}, "'sampler' is not of the form part=on", "correct that, or leave it out"),
        ({"OPSET_NATIVE": "atention=on"}, "unknown part 'atention'; did you mean 'attention'?", "correct that"),
        ({"VLLM_CPU_KVCACHE_SPACE": "-1"}, "'-1' is no number of GiB", "as in VLLM_CPU_KVCACHE_SPACE=4, or unset it"),
        ({"OPSET_KERNELS": "rms_norm=elsewhere"}, "which runs on npu, not on cpu", "name a kernel that does: cpp"),
    ],
)
def test_doctor_says_what_is_wrong_and_the_cure(command_here, variables, what, cure, monkeypatch):
    elsewhere = kernel.Kernel("rms_norm", "elsewhere", "tests", ("npu",), kernel.everything, print)
    kernels_of("rms_norm")
    monkeypatch.setitem(kernel._registry["rms_norm"], "elsewhere", elsewhere)
    monkeypatch.setattr(doctor, "_kernels", lambda *_: [])  # listing them takes seconds
    finished = command_here("doctor", **variables)
    assert finished.exit_code == 1, finished.output
    (line,) = [line for line in finished.output.splitlines() if line.startswith("NOT USED: ")]
    assert what in line
    assert cure in line.partition(". Cure: ")[2]


def test_doctor_names_the_cure_where_two_platform_plugins_meet(tmp_path):
    (tmp_path / "other_platform.py").write_text("def activate():\n    return 'other_platform.Platform'\n")
    info = tmp_path / "other_platform-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other_platform\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.platform_plugins]\nother = other_platform:activate\n")
    script = "from vllm_opset.cli import doctor; print(doctor._active_platform())"
    finished = run("python", "-c", script, PYTHONPATH=tmp_path)
    assert "vLLM finds no platform: Only one platform plugin can be activated" in finished.out, finished.output
    assert "cure='set VLLM_PLUGINS=opset, which leaves out other platform plugins: other'" in finished.out


def test_doctor_lists_kernels_in_the_order_of_the_samples():
    """The order is not that of a set, which differs from run to run."""
    rows = doctor._kernels("cpu", torch.bfloat16)
    for op in ops.ALL:
        dtype = torch.bfloat16 if torch.bfloat16 in op.dtypes else op.dtypes[0]
        problems = [op.problem_for(*args, **kwargs) for args, kwargs in (s.make() for s in op.samples("cpu", dtype))]
        names = dict.fromkeys(selection.select(op, problem).kernel.name for problem in problems)
        assert [row["kernel"] for row in rows if row["op"] == op.name] == [*names]


def test_doctor_lists_the_variants_of_a_kernel():
    rows = doctor._kernels("cpu", torch.float32)
    for row in rows:
        variants = kernels_of(row["op"])[row["kernel"]].variants
        assert row["variants"] == ([] if variants is None else list(variants.by_name))
    (attention,) = [row for row in rows if (row["op"], row["kernel"]) == ("paged_attention", "cpp")]
    assert doctor._on_one_line(attention)["kernel"] == "cpp (decode, torch)"


def test_doctor_counts_what_an_override_cannot_do():
    finished = command("doctor", "--json", OPSET_KERNELS="paged_attention=cpu")
    assert finished.code == 0, finished.output
    rows = {row["kernel"]: row for row in json.loads(finished.out)["kernels"] if row["op"] == "paged_attention"}
    assert set(rows) == {"cpu", "none"} and "asks for paged_attention=cpu, which cannot do it" in rows["none"]["why"]


def test_doctor_says_why_the_platform_cannot_be_had():
    finished = command("doctor", "--json", OPSET_PLATFORM="of")
    assert finished.code == 1, finished.output
    (fault,) = json.loads(finished.out)["faults"]
    assert "OPSET_PLATFORM='of' is not a choice; known: auto, cpu, cuda, native, npu, off" in fault["what"]


@pytest.fixture
def torch_npu(tmp_path):
    """Makes a package that `import torch` loads, as it loads the real one: `torch_npu("what its import does")`."""

    def make(code: str) -> None:
        (tmp_path / "torch_npu.py").write_text(f"{code}\ndef _autoload(): ...\n")
        info = tmp_path / "torch_npu-2.13.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
        (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")

    return make


NO_CANN = "raise ImportError('libhccl.so: cannot open shared object file')"


def test_doctor_says_why_torch_cannot_be_imported_where_cann_is_absent(torch_npu, tmp_path):
    torch_npu(NO_CANN)
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in run("python", "-c", "import torch", PYTHONPATH=tmp_path).err
    finished = command("doctor", "--json", PYTHONPATH=tmp_path, ASCEND_HOME_PATH="/nowhere")
    assert finished.code == 1, finished.output
    found = json.loads(finished.out)
    (fault,) = found["faults"]
    assert "`import torch` fails in this environment" in fault["what"] and "libascendcl.so" in fault["what"]
    assert "ASCEND_HOME_PATH=/nowhere, which is no folder" in fault["what"] and "set_env.sh" in fault["what"]
    assert "export TORCH_DEVICE_BACKEND_AUTOLOAD=0" in fault["cure"]
    assert found["machine"]["torch_npu"] == "2.13.0"


def test_doctor_is_content_where_torch_does_not_load_torch_npu(torch_npu, tmp_path):
    torch_npu(NO_CANN)
    finished = command("doctor", "--json", PYTHONPATH=tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD=0)
    assert finished.code == 0, finished.output
    assert "CANN's libascendcl.so" in json.loads(finished.out)["unavailable"]["ascend"]


def test_doctor_says_that_torch_npu_cannot_be_imported(torch_npu, tmp_path):
    """Uses libraries with the names of CANN's libraries."""
    torch_npu("raise ImportError('undefined symbol: aclrtWhatever')")
    for library in CANN_LIBRARIES:
        build = run("g++", "-x", "c++", "/dev/null", "-shared", "-o", tmp_path / library)
        assert build.code == 0, build
    variables = {"PYTHONPATH": tmp_path, "LD_LIBRARY_PATH": tmp_path, "TORCH_DEVICE_BACKEND_AUTOLOAD": 0}
    finished = command("doctor", **variables)
    assert "torch_npu cannot be imported (undefined symbol: aclrtWhatever): install" in finished.output
    assert finished.code == 0, finished.output


# parity


def test_parity_agrees_with_a_right_kernel():
    finished = command("parity", "silu_and_mul", "rms_norm", "--dtype", "float32", "--dtype", "bfloat16", "--json")
    assert finished.code == 0, finished.output
    found = json.loads(finished.out)
    kernels = {(check["op"], check["kernel"]) for check in found["checks"]}
    assert kernels >= {("silu_and_mul", "cpu"), ("rms_norm", "reference")}
    assert {check["dtype"] for check in found["checks"]} == {"float32", "bfloat16"}
    assert found["failed"] == 0 < found["passed"]


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
        (["parity", "silu_and_mull"], {}, "unknown op 'silu_and_mull'; did you mean 'silu_and_mul'?"),
        (["parity", "--kernel", "mine"], {}, "no kernel named 'mine' runs on cpu"),
        (["parity", "rms_norm", "--dtype", "float61"], {}, "unknown: 'float61'; did you mean 'float16'?"),
        (["parity", "compute_slot_mapping", "--dtype", "float16"], {}, "none of the ops is checked in this dtype"),
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
def test_demo_answers_and_counts_the_calls_of_every_op():
    finished = command("demo", "--questions", "8")
    assert finished.code == 0, finished.output
    assert "8 of 8 right" in finished.output
    assert "tokens/s" in finished.output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in finished.output.splitlines() if "│" in line]
    calls = {op: int(count.split()[0]) for op, _, count, _ in (row for row in rows if len(row) == 4)}
    assert set(calls) >= USED_BY_QWEN3
    assert all(calls.values())
