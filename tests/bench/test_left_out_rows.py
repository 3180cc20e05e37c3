"""benchmarks/left_out_rows.py: an engine on a CPU computes all rows and fewer by turns."""

import json
import runpy

import pytest
from readme import ROOT
from vllm import envs

from vllm_opset.model.last_layer import ReadRows

FOLDER = ROOT / "benchmarks"


@pytest.mark.engine
def test_both_are_timed_by_turns(tmp_path, monkeypatch):
    monkeypatch.setenv("OPSET_PLATFORM", "cpu")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.syspath_prepend(str(FOLDER))  # the engine imports the worker's mixin from there
    script = runpy.run_path(str(FOLDER / "left_out_rows.py"), run_name="left_out_rows")
    computed, of_step = [], ReadRows.of_step

    def noted(self, layer_name: str, num_tokens: int):
        rows = of_step(self, layer_name, num_tokens)
        computed.append(num_tokens if rows is None else len(rows))
        return rows

    monkeypatch.setattr(ReadRows, "of_step", noted)
    try:
        script["main"]("tiny", ["2x40"], 3, "{}", tmp_path / "times.json")
    finally:
        envs.disable_envs_cache()  # an engine in this process fills it, and later tests set variables
    assert computed[-4:] == [80, 2, 80, 2]
    (times,) = json.loads((tmp_path / "times.json").read_text())["seconds"].values()
    assert {name: len(seconds) for name, seconds in times.items()} == {"true": 4, "false": 4}
