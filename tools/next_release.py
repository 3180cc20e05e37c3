"""next_release.py PYTHON SOURCE: builds vLLM from SOURCE in this environment, and lists what drifted.

PYTHON is that of an environment with a release that is served, with which it compares. SOURCE is an sdist or a source
tree. Afterwards the tests of the window run; --light leaves out those that start engines and servers. Further arguments
are pytest's. The exit status is 1 if anything drifted. Run by `make next-release`.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from vllm_opset.cli.show import print_table

ROOT = Path(__file__).parents[1]
SURFACE = ROOT / "tests/platform/surface.py"
RELEASE = "import vllm; print(vllm.__version__)"
# Without kernels, as pyproject.toml says. What this vLLM needs and the newest served release did not is not pinned.
INSTALL = (
    ROOT / ".venv-tools/bin/uv",
    "pip",
    "install",
    "--quiet",
    "--no-build-isolation",
    "--reinstall-package",
    "vllm",
)
INSTALL += ("--overrides", "requirements/overrides.txt", "--excludes", "requirements/excludes.txt")
BUILT = ("build", "vllm.egg-info")
WHOLE, LIGHT = "window", "window and not engine and not serve"
ALL = "*"  # of surface.py: the kind could not be listed


class Drift(NamedTuple):
    """kind: of `surface.KINDS`, or "test". change: what it was and is, or how the test failed."""

    kind: str
    name: str
    change: str


Surface = Mapping[str, Mapping[str, str]]


def drifted(before: Surface, after: Surface) -> Iterator[Drift]:
    """The differences between two results of `surface.py`."""
    for kind, now in after.items():
        then = before[kind]
        for name in sorted({ALL} if ALL in now else {*then, *now}):
            if name not in now:
                yield Drift(kind, name, "gone")
            elif name not in then:
                yield Drift(kind, name, f"new {now[name]}".rstrip())
            elif then[name] != now[name]:
                yield Drift(kind, name, f"{then[name]} -> {now[name]}")


def failed_tests(report: Path) -> Iterator[Drift]:
    """The tests that failed, by pytest's report in JUnit's format."""
    for case in ElementTree.parse(report).iter("testcase"):
        for outcome in (*case.iter("failure"), *case.iter("error")):
            lines = (outcome.get("message") or "").splitlines()
            yield Drift("test", f"{case.get('classname', '')}::{case.get('name')}", lines[0] if lines else "failed")


def install(source: Path) -> None:
    """Build that vLLM and install it here. A tree is copied without what earlier builds left in it."""
    with tempfile.TemporaryDirectory() as folder:
        if source.is_dir():
            copy = Path(folder) / "vllm"
            shutil.copytree(source, copy, ignore=lambda at, _: BUILT if Path(at) == source else (), symlinks=True)
            source = copy
        command = [*INSTALL, "--python", sys.executable, f"vllm @ {source.as_uri()}"]
        subprocess.run(command, cwd=ROOT, check=True)


def surface_of(python: str, without: Iterable[str] = ()) -> Surface:
    return json.loads(_output(python, str(SURFACE), *without))


def release_of(python: str) -> str:
    return _output(python, "-c", RELEASE)


def run_tests(marks: str, arguments: list[str]) -> list[Drift]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-n", "auto", "--no-loadscope-reorder", "-q", f"--junitxml={report}"]
        command = [sys.executable, "-m", "pytest", *options, "-m", marks, *arguments]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        failures = list(failed_tests(report)) if report.exists() else []
    return failures or ([Drift("test", marks, f"pytest ended with status {status}")] if status else [])


def _output(python: str, *command: str) -> str:
    """The last line that a command prints on standard output. Its errors are shown."""
    return subprocess.run([python, *command], stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1]


def main(python: str, source: str, *arguments: str) -> int:
    install(Path(source).resolve())
    after = surface_of(sys.executable)
    # Else all that a module uses would be listed as gone if it cannot be imported.
    found = list(drifted(surface_of(python, after["import"]), after))
    show(f"From vLLM {release_of(python)} to {release_of(sys.executable)}", found)
    marks = LIGHT if "--light" in arguments else WHOLE
    failures = run_tests(marks, [argument for argument in arguments if argument != "--light"])
    show("Tests", failures)
    print(f"{len(found)} drifted, {len(failures)} tests failed. CONTRIBUTING.md says what to do about each kind.")
    return 1 if found or failures else 0


def show(title: str, found: list[Drift]) -> None:
    print_table(title if found else f"{title}: nothing", Drift._fields, (drift._asdict() for drift in found))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
