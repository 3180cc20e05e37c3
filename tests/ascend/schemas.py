"""schemas.py WHEEL NAME...: prints the schemas of torch_npu's operators that a wheel's libraries contain as text.

It is for releases that are not installed, because each needs a PyTorch of its own. From 2.13 on, the libraries do not
contain the schemas of the ATB operators.
"""

import re
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parent / "schemas"


def in_wheel(wheel: str, names: list[str]) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        libraries = [archive.read(name) for name in archive.namelist() if re.fullmatch(r"torch_npu/lib/.*\.so", name)]
    pattern = rb"\0((?:%b)\([^\0]*\) -> [^\0]*)\0" % "|".join(map(re.escape, names)).encode()
    return sorted({found.decode() for library in libraries for found in re.findall(pattern, library)})


def recorded(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """By release, the printed schemas of these operators, which are named like "npu::npu_swiglu"."""
    return {path.stem: _named(path.read_text().splitlines(), names) for path in sorted(FOLDER.glob("*.txt"))}


def _named(texts: list[str], names: Iterable[str]) -> dict[str, str]:
    by_operator = {text.split("(")[0]: text for text in texts}
    return {name: by_operator[operator] for name in names if (operator := name.split("::")[1]) in by_operator}


if __name__ == "__main__":
    print("\n".join(in_wheel(sys.argv[1], sys.argv[2:])))
