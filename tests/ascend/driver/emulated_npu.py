"""An emulated Ascend NPU: the real torch_npu over an emulated driver and PyTorch's CPU kernels. See README.md.

In this process, call `load()` before torch_npu is imported. Other processes, and all that they start, get
`variables()`. With these, `import torch` loads torch_npu as it does with a real driver, and then this module.
"""

import ctypes
import hashlib
import importlib
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
ASCEND = HERE.parent
ROOT = HERE.parents[2]
SOURCES = (
    *(HERE / name for name in ("driver.c", "recorder.cpp", "recorder.h", "reroute.cpp")),
    ASCEND / "stubs.py",
    Path(__file__),
)
COMPILE = ("g++", "-std=c++20", "-O1", "-fPIC")
# When PyTorch is imported, it loads the extensions that these entry points name. torch_npu has such an entry too.
ENTRY_POINTS = "[torch.backends]\nemulated_npu = emulated_npu:complete\n"

# torch_npu launches from a thread of its own. A failing operator would leave that thread stuck, so it is off here.
SETTINGS = {"TASK_QUEUE_ENABLE": "0"}

_complete = False


def build() -> Path:
    """Compiles the driver and the rerouting, unless that was done before. Returns the folder with both."""
    contents = b"".join(path.read_bytes() for path in SOURCES)
    installed = f"{version('torch')} {version('torch_npu')} {sys.version}"
    folder = ROOT / "build" / f"emulated-npu-{hashlib.sha256(contents + installed.encode()).hexdigest()[:12]}"
    if not (folder / "libraries").exists():
        folder.mkdir(parents=True, exist_ok=True)
        _compile_into(folder)
    return folder


def _compile_into(folder: Path) -> None:
    import stubs

    driver = [folder / "driver.o", folder / "recorder.o"]
    subprocess.run(["gcc", "-O1", "-fPIC", "-c", HERE / "driver.c", "-o", driver[0]], check=True)
    subprocess.run([*COMPILE, "-c", HERE / "recorder.cpp", "-o", driver[1]], check=True)
    libraries = stubs.build(folder, *driver)
    torch = stubs._package("torch")
    include = [f"-I{torch / 'include'}", f"-I{torch / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    command = [*COMPILE, "-shared", *include, HERE / "reroute.cpp"]
    linked = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-L{folder}", "-lascendcl"]
    subprocess.run([*command, "-o", folder / "reroute.so", *linked], check=True)
    metadata = folder / "emulated_npu-0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: emulated-npu\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "libraries").write_text("\n".join(library.name for library in libraries))


def load() -> None:
    """Sets up the emulated NPU in this process. PyTorch must not have loaded torch_npu yet."""
    os.environ |= SETTINGS
    folder = build()
    for name in (folder / "libraries").read_text().split():
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    complete()


def complete() -> None:
    """Adds the operators, which the driver alone does not provide: PyTorch's own, and those that are emulated."""
    global _complete
    if _complete:
        return
    _complete = True
    if str(ASCEND) not in sys.path:
        sys.path.insert(0, str(ASCEND))
    import torch
    import torch_npu  # noqa: F401

    emulation = importlib.import_module("emulation")
    torch.set_num_threads(1)
    names = [*emulation.OPERATORS, *emulation.graphs.CAPTURED]
    ctypes.CDLL(str(build() / "reroute.so")).reroute_operators(" ".join(names).encode())


def variables() -> dict[str, str]:
    """Environment variables for a process that is to find the emulated NPU. EMULATED_NPU_SOC names another product."""
    folder = build()
    return {
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": os.pathsep.join(map(str, (folder, HERE, ASCEND))),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        **SETTINGS,
    }
