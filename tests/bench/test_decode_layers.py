"""benchmarks/decode_layers.py: decode layers with several overrides of the launch table."""

import copy
import json
import sys

import pytest
import torch
from processes import run
from readme import ROOT

from vllm_opset import ops
from vllm_opset.bench import shapes
from vllm_opset.ops.schemes import dequantise

SCRIPT = ROOT / "benchmarks" / "decode_layers.py"
KEYS = "paged_attention_decode.keys"


def test_variants_are_timed_and_agree(tmp_path):
    pytest.importorskip("triton", reason="runs Triton's kernels: runs where there is Triton")
    kept = tmp_path / "times.json"
    given = {"base": "", "k64": f"{KEYS}:64", "alone": "-silu_and_mul,-linear", "vain": "layer_norm.warps:4"}
    words = [word for name, changes in given.items() for word in ("--variant", f"{name}={changes}")]
    finished = run(sys.executable, SCRIPT, "tiny:2:40", *words, "--dry", "--json", kept, COLUMNS=100)
    assert finished.code == 0, finished.output
    variants = json.loads(kept.read_text())["tiny:2:40"]["variants"]
    assert {name: measured["unused"] for name, measured in variants.items()} == {
        "base": [], "k64": [], "alone": [], "vain": ["layer_norm"]
    }  # fmt: skip
    for measured in variants.values():
        assert len(measured["us"]) == 1 and measured["us"][0] > 0 and measured["difference"] <= 2**-5
    assert f"{variants['base']['us'][0]:.2f}" in finished.out and "differs" not in finished.out
    assert "no layer_norm" in finished.out


def test_kernels_get_the_values_of_a_variant_and_its_change_is_that_to_the_first(monkeypatch):
    pytest.importorskip("triton", reason="reads the launch table: runs where there is Triton")
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import decode_layers

    from vllm_opset.kernels.triton import _launch

    asked, variant = ("paged_attention_decode", torch.device("cpu"), 1), decode_layers.variant_of(f"k64={KEYS}:64")
    before = _launch.parameters(*asked)
    assert before["keys"] != 64
    with variant.used():
        assert _launch.parameters(*asked) == {**before, "keys": 64}
    assert _launch.parameters(*asked) == before
    measured = {"us": [3.0, 9.0, 1.0], "difference": 0.0, "unused": []}
    assert decode_layers._change(measured, 2.0) == "+50.0 %"
    assert decode_layers._change(measured | {"difference": float("nan")}, 4.0) == "-25.0 %, differs"


@pytest.mark.parametrize(
    ("shape", "variant", "message"),
    [
        ("tiny:2:40", "paged_attention_decod.keys:32", "did you mean 'paged_attention_decode'?"),
        ("tiny:2:40", "-silu_and_mull", "did you mean 'silu_and_mul'?"),
        ("qwen3-30b-a3b:2:40", f"{KEYS}:32", "Qwen3MoeForCausalLM is none of"),
    ],
)
def test_what_is_not_known_is_refused(shape, variant, message):
    pytest.importorskip("triton", reason="reads the launch table: runs where there is Triton")
    finished = run(sys.executable, SCRIPT, shape, "--variant", f"k32={variant}", "--dry", COLUMNS=200)
    assert finished.code == 2 and message in finished.output


@pytest.mark.parametrize("name", ["qwen3-8b-fp8", "qwen3-8b-fp8-channel"])
def test_layers_in_fp8_agree_with_those_of_the_weights_that_theirs_stand_for(name, monkeypatch):
    """By the contracts of the ops: what is tested is which of them are called, and by which weights and scales."""
    pytest.importorskip("triton", reason="imports Triton's kernels: runs where there is Triton")
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import decode_model

    monkeypatch.setattr(decode_model, "run", lambda op, *args, **options: ops.BY_NAME[op](*args, **options))
    config = {**shapes.load("tiny").config, "quantization_config": shapes.load(name).config["quantization_config"]}
    assert decode_model.why_unknown(config) is None
    model = decode_model.Model(decode_model.Step("tiny", config, num_reqs=2, context=40, max_model_len=40), "cpu")
    layer, plain = model.layers[0], copy.deepcopy(model.layers[0])
    plain.groups = None
    plain.qkv, plain.o, plain.gate_up, plain.down = (
        decode_model.Weight(dequantise(weight.values, weight.scale, torch.float32)) for weight in layer.weights
    )
    results = []
    for each in (layer, plain):
        x, residual = model.hidden.clone(), model.hidden.clone()
        attended = each.attend(x, residual, model.inputs, model.inputs.batch(), model.kv_caches[0].clone(), None)
        results += [attended, each.finish(attended, residual)]
    for found, wanted in zip(results[:2], results[2:], strict=True):
        assert (found - wanted).norm() < 2**-3 * wanted.norm()  # of four roundings to e4m3
