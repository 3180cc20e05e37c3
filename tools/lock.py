"""lock.py RELEASE...: writes requirements/vllm-RELEASE.txt, every package of that environment except torch and vLLM.

What vLLM and torch need is read from their CPU builds: PyPI describes the CUDA wheels. Run by `make lock`, in .venv.
"""

import subprocess
import sys
import tempfile
from importlib.metadata import Distribution, distribution, distributions

from packaging.requirements import Requirement

UV = ".venv-tools/bin/uv"


def needs(package: Distribution) -> list[str]:
    """What `package` needs on Python 3.12, for 3.11 as well: one list of pins serves both."""
    found = []
    for requirement in map(Requirement, package.requires or []):
        if requirement.marker is None or requirement.marker.evaluate({"python_version": "3.12", "extra": ""}):
            requirement.marker = None
            found.append(str(requirement))
    return found


def build_vllm(release: str, folder: str) -> Distribution:
    command = [UV, "pip", "install", "--quiet", "--python", ".venv", "--target", folder]
    command += ["--no-deps", "--no-build-isolation", "--no-binary", "vllm", f"vllm=={release}"]
    subprocess.run(command, check=True)
    return next(iter(distributions(name="vllm", path=[folder])))


def lock(release: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        requirements = [*needs(build_vllm(release, folder)), *needs(distribution("torch"))]
    command = [UV, "pip", "compile", "--quiet", "--no-annotate", "--custom-compile-command", "make lock"]
    command += ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28"]
    command += ["--overrides", "requirements/overrides.txt", "--excludes", "requirements/excludes.txt"]
    command += ["-o", f"requirements/vllm-{release}.txt", "requirements/common.in", "-"]
    subprocess.run(command, check=True, input="\n".join(requirements), text=True)


if __name__ == "__main__":
    for release in sys.argv[1:]:
        lock(release)
