"""The README and the pages: links lead somewhere, quoted messages are the code's, and figures were measured."""

import ast
import importlib.util
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from readme import ROOT

from vllm_opset.platform import CHOICES, switches

DOCS = ROOT / "docs"
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")] + sorted(DOCS.rglob("*.md"))
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
ANY = "…"  # what differs from case to case in a message


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    for link in LINK.findall(prose(page)):
        if not link.startswith("https://"):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


# The README


def test_the_readmes_first_commands_are_targets_and_ci_runs_its_tests():
    commands = re.findall(r"^make (\w+) ", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert commands == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in commands)
    by_ci = " ".join(re.findall(r"^make (.*)", (ROOT / ".ci/run").read_text(), re.MULTILINE)).split()
    assert "test" in by_ci


def test_the_readmes_figures_were_measured():
    measured = " ".join(page.read_text() for page in (DOCS / "benchmarks").glob("*.md")).split()
    table = re.findall(r"^\| (?:.*tokens/s|start-up.*) \| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(table) == 5
    for row in table:
        stock, *ours = (re.fullmatch(r"([\d,.]+)(?: \(([\d.]+).\))?", cell) for cell in row.split(" | "))
        for cell in (stock, *ours):
            assert cell[1] in measured, row
        for cell in ours:
            assert cell[2] is None or float(cell[2]) == pytest.approx(number(cell[1]) / number(stock[1]), abs=0.01), row


def number(figure: str) -> float:
    return float(figure.replace(",", ""))


# Settings


def test_configuration_explains_every_platform_and_part():
    rows = re.findall(r"^\| `([a-z]+)` \|", (DOCS / "configuration.md").read_text(), re.MULTILINE)
    assert rows == [*CHOICES, *switches.PARTS]


# Messages


def literals() -> Iterator[str]:
    """Every string of the package and of two of vLLM's modules, docstrings apart, and a script's text."""
    vllm = Path(importlib.util.find_spec("vllm").origin).parent
    quoted = (vllm / "platforms" / "__init__.py", vllm / "entrypoints" / "llm.py")
    for file in (*(ROOT / "vllm_opset").rglob("*.py"), *quoted):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        docstrings = [node.value for node in nodes if isinstance(node, ast.Expr)]
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                yield ANY.join(part.value for part in node.values if isinstance(part, ast.Constant))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
                yield node.value
    yield (ROOT / "tools" / "venv.sh").read_text()


def test_every_message_of_the_troubleshooting_page_is_in_the_code():
    page = (DOCS / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| `(.*?)` \|", page, re.MULTILINE)
    messages += ["NOT USED: …. Cure: …", "vllm-opset: … of … raised this for …"]
    assert all(f"`{message}`" in page for message in messages)
    known = list(literals())
    patterns = {message: re.compile(".*".join(map(re.escape, message.split(ANY)))) for message in messages}
    assert [message for message, pattern in patterns.items() if not any(map(pattern.search, known))] == []


# The changelog


def test_the_changelog_ends_with_the_projects_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    headings = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", project["version"]]
