"""unpack_wheels.py FOLDER KEPT...: unpacks what `collect.sh` has downloaded, without what few engines on Hopper load.

KEPT: names of LEFT_OUT that are kept.
"""

import sys
import zipfile
from pathlib import Path

LEFT_OUT = (
    "_vllm_fa2_C", "third_party/fmha_sm100", "_qutlass_C", "vllm/vllm-rs", "swagger-ui-bundle.js",
    "torch/include/", "torch/bin/protoc", "torch/test/", "libtorch_cuda_linalg",
    "triton/backends/nvidia/bin/cuobjdump", "triton/backends/nvidia/bin/nvdisasm", "ptxas-blackwell",
    "triton/backends/nvidia/lib/cupti", "triton/backends/amd/lib", "triton/backends/amd/include", "triton/profiler",
    "triton/instrumentation", "triton/plugins", "libproton",
)  # fmt: skip


def unpack(wheels: Path, target: Path, wanted) -> None:
    """Unpacks all wheels of a folder: the files whose name is wanted."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if wanted(name):
                    archive.extract(name, target)


def main(folder: Path, *kept: str) -> None:
    left_out = [part for part in LEFT_OUT if part not in kept]
    unpack(folder / "wheels", folder / "site", lambda name: not any(part in name for part in left_out))
    unpack(folder / "nccl", folder / "nccl", lambda name: name.endswith("libnccl.so.2"))
    # The package itself is imported from a checkout. Its metadata is what makes vLLM find the plugin.
    unpack(folder / "extras", folder / "extras_site", lambda name: not name.startswith("vllm_opset/"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
