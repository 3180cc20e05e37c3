"""benchmarks/decode_layers.py: decode layers with several overrides of the launch table."""

import json
import sys

import pytest
from processes import run
from readme import ROOT

SCRIPT = ROOT / "benchmarks" / "decode_layers.py"
KEYS = "paged_attention_decode.keys"


def test_variants_are_timed_and_agree(tmp_path):
    pytest.importorskip("triton", reason="runs Triton's kernels: runs where there is Triton")
    kept = tmp_path / "times.json"
    words = ("--variant", "base=", "--variant", f"k32={KEYS}:32", "--dry", "--json", kept)
    finished = run(sys.executable, SCRIPT, "tiny:2:40", *words, COLUMNS=100)
    assert finished.code == 0, finished.output
    variants = json.loads(kept.read_text())["tiny:2:40"]["variants"]
    assert list(variants) == ["base", "k32"]
    for measured in variants.values():
        assert len(measured["us"]) == 1 and measured["us"][0] > 0 and measured["difference"] <= 2**-5
    assert f"{variants['base']['us'][0]:.2f}" in finished.out and "differs" not in finished.out


@pytest.mark.parametrize(
    ("shape", "variant", "message"),
    [
        ("tiny:2:40", "paged_attention_decod.keys:32", "did you mean 'paged_attention_decode'?"),
        ("qwen3-30b-a3b:2:40", f"{KEYS}:32", "Qwen3MoeForCausalLM is none of"),
    ],
)
def test_what_is_not_known_is_refused(shape, variant, message):
    pytest.importorskip("triton", reason="reads the launch table: runs where there is Triton")
    finished = run(sys.executable, SCRIPT, shape, "--variant", f"k32={variant}", "--dry", COLUMNS=200)
    assert finished.code == 2 and message in finished.output
