"""A process that configures an engine for a GPU and then forks, over an emulated NVML, without a GPU."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from processes import Finished, run
from small_models import LLAMA

pytestmark = pytest.mark.skipif(
    not shutil.which("g++"), reason="no C compiler, until g++ is installed (.ci/run requires it)"
)

UUID = "GPU-00000000-1111-2222-3333-444444444444"
SCRIPT = """
import json, sys, torch, types

def initialised(): raise SystemExit("CUDA was initialised")

wheel, gpus = sys.argv[2] == "native", int(sys.argv[3])
torch.version.cuda, torch.cuda.device_count, torch.cuda._lazy_init = "13.0", lambda: gpus, initialised
from vllm_opset.platform import stock
stock.has_kernels_for_cuda = lambda: wheel
if wheel:
    sys.modules |= {name: types.ModuleType(name) for name in ("vllm._C", "vllm._C_stable_libtorch")}
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform as platform

config = EngineArgs(sys.argv[1], skip_tokenizer_init=True, dtype="bfloat16").create_engine_config()
print(json.dumps([
    type(platform).__name__, platform.get_device_name(), platform.get_device_total_memory(),
    platform.visible_device_id_to_physical_device_id(0), config.device_config.device_type,
]))
"""

DOCTOR = """
import sys, types
import torch

def initialised(): raise SystemExit("CUDA was initialised")

torch.version.cuda, torch.cuda.device_count, torch.cuda._lazy_init = "13.0", lambda: 0, initialised
from vllm_opset.platform import stock
stock.has_kernels_for_cuda = lambda: True
sys.modules |= {name: types.ModuleType(name) for name in ("vllm._C", "vllm._C_stable_libtorch")}
from vllm_opset import cli
cli.doctor._kernels = lambda *_: []  # listing them takes seconds
sys.argv = ["vllm-opset", "doctor", "--json"]
cli.main()
"""

ASKED = """
import os
from vllm_opset.platform.cuda import nvml

for visible in ("0", "1", "1,0"):
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    print([found and found.name for found in (nvml.gpu(0), nvml.gpu(1))])
"""


@pytest.fixture
def emulated(tmp_path):
    folder = tmp_path / "nvml"
    folder.mkdir()
    source = Path(__file__).with_name("nvml.c")
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source], check=True)
    return folder


def configured(platform: str, visible: str, gpus: int, emulated: Path, folder: Path) -> Finished:
    """A process that configures an engine of a model in this folder, where vLLM's cache is, too."""
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "script.py").write_text(SCRIPT)
    settings = {"OPSET_PLATFORM": platform, "CUDA_VISIBLE_DEVICES": visible, "LD_LIBRARY_PATH": emulated}
    return run("python", folder / "script.py", folder, platform, gpus, VLLM_CACHE_ROOT=folder, **settings)


@pytest.mark.window
def test_cuda_is_not_initialised_before_processes_are_forked(emulated, tmp_path):
    # The second one is as in a driver of Ray, whose workers have the GPUs. Nothing can import the models of a wheel
    # that is not here. So the first one has to inspect the model's class, and vLLM remembers that for the second.
    for platform, visible, gpus in (("cuda", UUID, 1), ("native", "", 0)):
        found = configured(platform, visible, gpus, emulated, tmp_path)
        assert found.code == 0, found
        answer = json.loads(found.out.splitlines()[-1])
        assert answer == [f"Opset{platform.title()}Platform", "Emulated GPU", 80 << 30, 0, "cuda"]


def test_a_gpu_is_the_one_that_is_visible_now(emulated):
    """NVML has one GPU here, with the number 0. A number beyond the visible GPUs is unknown.

    The other test asks the bindings of each vLLM release for a GPU by its UUID and by its number.
    """
    found = run("python", "-c", ASKED, OPSET_PLATFORM="cpu", LD_LIBRARY_PATH=emulated)
    assert found.code == 0, found
    assert found.out.splitlines()[-3:] == ["['Emulated GPU', None]", "[None, None]", "[None, 'Emulated GPU']"]


def test_doctor_knows_the_parts_where_a_variable_hides_the_gpus(emulated):
    """vLLM's own wheel serves there, as in a driver of Ray."""
    settings = {"OPSET_PLATFORM": "native", "CUDA_VISIBLE_DEVICES": "", "LD_LIBRARY_PATH": emulated}
    found = run("python", "-c", DOCTOR, **settings)
    assert found.code == 0, found
    report = json.loads(found.out)
    assert report["platform"].endswith("OpsetNativePlatform") and report["parts"]["attention"]["on"]
    assert "hides every NVIDIA GPU" in report["machine"]["accelerator"]
