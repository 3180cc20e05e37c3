"""benchmarks/first_token.py: engines that are all up and are asked one at a time."""

import re
import runpy

import pytest
from readme import ROOT

from vllm_opset.bench.engines import Engine

pytestmark = pytest.mark.engine


def test_every_engine_answers_prompts_of_every_length(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    script = runpy.run_path(str(ROOT / "benchmarks" / "first_token.py"))
    # In one process, an engine imports vLLM once. One engine will do: each has a column of its own.
    environment = {"OPSET_PLATFORM": "cpu", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    engines = tuple(Engine(name, {"max_num_seqs": 4}, environment) for name in ("one",))
    monkeypatch.setitem(script["main"].__globals__, "ENGINES", engines)
    monkeypatch.setitem(script["main"].__globals__, "LENGTHS", (16, 48))
    script["main"]("tiny", 2)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    rows = [row for row in rows if row]
    assert [row[0] for row in rows] == ["16", "48"]
    for _, *found in rows:
        assert len(found) == len(engines)
        for cell in found:
            median, fastest, slowest = map(float, re.findall(r"[\d.]+", cell))
            assert 0 < fastest <= median <= slowest
