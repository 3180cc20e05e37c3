"""Every package of the environments is pinned by hashes, and no index is named."""

import re
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).parents[1] / "requirements"
NOT_INSTALLED = {"excludes.txt", "overrides.txt"}  # files that `make lock` leaves out
INSTALLED = sorted(path for path in REQUIREMENTS.glob("*.txt") if path.name not in NOT_INSTALLED)
PIN = re.compile(r"[\w.-]+==[\w.+]+((\s|\\\n)+--hash=sha256:[0-9a-f]{64})+")


@pytest.mark.parametrize("path", INSTALLED, ids=lambda path: path.name)
def test_every_line_is_a_pin_with_hashes_or_another_file(path):
    text = re.sub(r"^#.*\n|^-r shared\.txt\n", "", path.read_text(), flags=re.MULTILINE)
    assert PIN.sub("", text).strip() == ""
    assert "==" in path.read_text()


def test_the_source_of_every_release_is_pinned():
    releases = {path.stem.removeprefix("vllm-") for path in REQUIREMENTS.glob("vllm-[0-9]*.txt")}
    assert releases == set(re.findall(r"^vllm==(\S+) ", (REQUIREMENTS / "vllm.txt").read_text(), re.MULTILINE))
