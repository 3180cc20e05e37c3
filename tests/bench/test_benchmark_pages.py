"""The pages of benchmarks: each is what its command generates from the results beside it."""

import runpy
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
from readme import ROOT
from typer.testing import CliRunner

from vllm_opset.bench.compare_report import Report
from vllm_opset.bench.pictures import RATE, _rows, _speed_ups
from vllm_opset.bench.report import COMPILED, OpsReport
from vllm_opset.cli import app

FOLDER = ROOT / "docs" / "benchmarks"
# Comparisons that later ones of the same shape have replaced. The log refers to them.
REPLACED = ROOT / "docs" / "log" / "h200-engines-replaced.json"


def copied(name: str, tmp_path: Path) -> Path:
    """A copy of the results, in another folder."""
    return Path(shutil.copy(FOLDER / f"{name}.json", tmp_path))


def size(picture: bytes) -> tuple[int, int]:
    """Width and height of a PNG."""
    assert picture.startswith(b"\x89PNG")
    return struct.unpack(">II", picture[16:24])


@pytest.mark.parametrize(
    ("command", "name", "plot"),
    [(("bench",), "h200", "ops.png"), (("bench", "e2e"), "h200-engines", "engines.png")],
    ids=["kernels", "engines"],
)
def test_a_page_is_generated_whole_from_its_results(command, name, plot, tmp_path):
    results, page, picture = copied(name, tmp_path), tmp_path / f"{name}.md", tmp_path / plot
    again = tmp_path / "again.json"
    words = (*command, "--from", results, "--markdown", page, "--plot", picture)
    finished = CliRunner().invoke(app, [*map(str, words)])
    assert finished.exit_code == 0, finished.output
    assert page.read_text() == (FOLDER / page.name).read_text()
    # Fonts differ from machine to machine, and the number of rows decides the size.
    assert size(picture.read_bytes()) == size((FOLDER / plot).read_bytes())

    finished = CliRunner().invoke(app, [*map(str, (*command, "--from", results, "--json", again))])
    assert finished.exit_code == 0, finished.output
    assert again.read_text() == results.read_text()


def test_a_page_names_all_files_that_it_is_generated_from(tmp_path):
    first, second, page = tmp_path / "first.json", tmp_path / "second.json", tmp_path / "page.md"
    for file in (first, second):
        shutil.copy(FOLDER / "h200.json", file)
    words = ("bench", "--from", first, "--from", second, "--markdown", page)
    assert CliRunner().invoke(app, [*map(str, words)]).exit_code == 0
    by = "`vllm-opset bench --from first.json --from second.json --markdown FILE`"
    assert f"generated from [first.json](first.json) and [second.json](second.json) by {by};" in page.read_text()


def test_the_picture_has_a_row_for_each_mode_of_a_comparison():
    opset = "vllm_opset.platform.cuda"
    platforms = {"stock": "vllm", "opset": opset, "native": "vllm_opset.platform.native", "again": opset}
    seconds = {"stock": 80.4, "opset": 35.1, "native": None, "again": 36}
    rates = {"stock": [100, 200, 400], "opset": [300, 250, 100], "native": [100, 100, 190], "again": [1, 1, 1]}
    engines = [{"name": name, "platform": of, "seconds": seconds[name]} for name, of in platforms.items()]
    results = [{"case_name": "a case", "engine": name, "metrics": {RATE: rates[name]}} for name in platforms]
    rows = _rows(Report({"commit": "0123456789", "shape": {"name": "a shape"}, "engines": engines, "results": results}))
    assert [(row.label, row.first, row.ratios, row.start) for row in rows] == [
        ("a shape, 0123456   without compiled kernels", True, {"a case": 1.25}, "35 (80)"),
        ("on vLLM's own wheel", False, {"a case": 0.5}, ""),
    ]


def kernels(seconds: dict[tuple[str, str], float], device: str = "a GPU") -> OpsReport:
    """The report of one case of each op, with these times by op and implementation."""
    results = [
        SimpleNamespace(op=op, case="T1", implementation=name, peer=name == COMPILED, seconds=time)
        for (op, name), time in seconds.items()
    ]
    return OpsReport(device, None, results, {}, commit=None, versions={})


def test_a_picture_of_several_reports_has_each_op_by_the_last_that_times_it_beside_a_peer():
    first = kernels({("relu2", "triton"): 1, ("relu2", COMPILED): 2, ("route", "triton"): 1, ("route", COMPILED): 3})
    without_peer, again = kernels({("relu2", "triton"): 1}), kernels({("route", "triton"): 1, ("route", COMPILED): 4})
    assert _speed_ups([first, without_peer, again]) == {"relu2": (True, [2]), "route": (True, [4])}


def test_a_picture_of_several_devices_is_refused():
    with pytest.raises(ValueError, match="shows one device, and these results are of a GPU and a CPU"):
        _speed_ups([kernels({}), kernels({}), kernels({}, "a CPU")])


def test_the_page_of_replaced_comparisons_is_generated_whole_from_its_results(tmp_path):
    page = tmp_path / REPLACED.with_suffix(".md").name
    results = shutil.copy(REPLACED, tmp_path)
    finished = CliRunner().invoke(app, ["bench", "e2e", "--from", str(results), "--markdown", str(page)])
    assert finished.exit_code == 0, finished.output
    assert page.read_text() == REPLACED.with_suffix(".md").read_text()


def test_the_page_of_a_cpu_is_generated_whole_from_its_results(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    results, page, again = copied("cpu", tmp_path), tmp_path / "cpu.md", tmp_path / "again.json"
    main = runpy.run_path(str(ROOT / "benchmarks" / "cpu_serving.py"))["main"]
    main(from_file=results, markdown_file=page, json_file=again)
    assert page.read_text() == (FOLDER / page.name).read_text()
    assert again.read_text() == results.read_text()
