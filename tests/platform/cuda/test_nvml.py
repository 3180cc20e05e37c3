"""A process that configures an engine for a GPU and then forks, over an emulated NVML, without a GPU."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from processes import run
from small_models import LLAMA

pytestmark = [
    pytest.mark.window,
    pytest.mark.skipif(not shutil.which("g++"), reason="no C compiler, until g++ is installed (.ci/run requires it)"),
]

UUID = "GPU-00000000-1111-2222-3333-444444444444"
SCRIPT = """
import json, sys, torch, types

def initialised(): raise SystemExit("CUDA was initialised")

wheel, gpus = sys.argv[2] == "native", int(sys.argv[3])
torch.version.cuda, torch.cuda.device_count, torch.cuda._lazy_init = "13.0", lambda: gpus, initialised
from vllm_opset.platform import compat, stock
stock.has_kernels_for_cuda = lambda: wheel
if wheel:
    sys.modules |= {name: types.ModuleType(name) for name in ("vllm._C", "vllm._C_stable_libtorch")}
    compat.inspect_models_in_this_process()  # another one would find no such wheel
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform as platform

config = EngineArgs(sys.argv[1], skip_tokenizer_init=True, dtype="bfloat16").create_engine_config()
print(json.dumps([
    type(platform).__name__, platform.get_device_name(), platform.get_device_total_memory(),
    platform.visible_device_id_to_physical_device_id(0), config.device_config.device_type,
]))
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


@pytest.mark.parametrize(
    ("platform", "visible", "gpus"),
    [("cuda", UUID, 1), ("native", "", 0)],  # the second one as in a driver of Ray, whose workers have the GPUs
    ids=["cuda", "native in Ray"],
)
def test_cuda_is_not_initialised_before_processes_are_forked(platform, visible, gpus, emulated, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "script.py").write_text(SCRIPT)
    settings = {"OPSET_PLATFORM": platform, "CUDA_VISIBLE_DEVICES": visible, "LD_LIBRARY_PATH": emulated}
    found = run("python", tmp_path / "script.py", tmp_path, platform, gpus, **settings)
    assert found.code == 0, found
    answer = json.loads(found.out.splitlines()[-1])
    assert answer == [f"Opset{platform.title()}Platform", "Emulated GPU", 80 << 30, 0, "cuda"]


def test_a_gpu_is_the_one_that_is_visible_now(emulated):
    """NVML has one GPU here, with the number 0. A number beyond the visible GPUs is unknown."""
    found = run("python", "-c", ASKED, OPSET_PLATFORM="cpu", LD_LIBRARY_PATH=emulated)
    assert found.code == 0, found
    assert found.out.splitlines()[-3:] == ["['Emulated GPU', None]", "[None, None]", "[None, 'Emulated GPU']"]
