"""The Ascend page agrees with the answers of the kernels."""

import re
from pathlib import Path

import matrix

from vllm_opset.kernels.ascend import _constraints

PAGE = (Path(__file__).parents[2] / "docs" / "ascend.md").read_text()


def test_the_matrix_of_the_page_is_what_the_kernels_answer():
    start, end = "<!-- matrix -->\n", "\n<!-- end of the matrix -->"
    on_the_page = PAGE.split(start)[1].split(end)[0].splitlines()
    assert on_the_page == matrix.rows(), "python tests/ascend/matrix.py prints it anew"


def test_the_page_names_every_conflict_and_its_value():
    named = dict(re.findall(r"^\| `([A-Z_]+)` \| `(.*?)` \|", PAGE, re.MULTILINE))
    conflicts = Path(_constraints.__file__).read_text().split("# Conflict:")[1:]
    names = {next(line.split(" = ")[0] for line in part.splitlines() if " = " in line) for part in conflicts}
    assert names <= set(named)
    assert named == {name: str(getattr(_constraints, name)) for name in named}


def test_the_page_says_what_was_not_run():
    assert "Not run on Ascend hardware; not compiled or executed by CANN." in PAGE
    assert "verifies this project's adapters, not Huawei's kernels." in " ".join(PAGE.split())
