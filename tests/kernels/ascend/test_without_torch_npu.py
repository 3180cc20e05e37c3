"""The Ascend kernels without torch_npu: the reason why they are unavailable, and the caches that they take."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_opset import ops
from vllm_opset.kernel import kernels_of
from vllm_opset.kernels import ascend
from vllm_opset.kernels.ascend import _cache, _constraints
from vllm_opset.ops.attention._paged_inputs import LAYOUTS, SPLIT_KV, poisoned_cache
from vllm_opset.ops.contract import Problem
from vllm_opset.ops.schemes import FP8, INT8, PER_ROW, Quantised, Scheme
from vllm_opset.targets import Target


def test_without_torch_npu_the_reason_says_so():
    assert ascend.unavailable().startswith("torch_npu is not installed")


def test_without_cann_the_reason_names_the_libraries_and_the_cure(tmp_path):
    """Runs in a process of its own, with a torch_npu that must not be imported for the answer."""
    package = tmp_path / "torch_npu" / "__init__.py"
    package.parent.mkdir()
    package.write_text("raise AssertionError('imported')")
    code = (
        "import sys; sys.path.append(sys.argv[1]); from vllm_opset.kernels import ascend; print(ascend.unavailable())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=Path(ops.__file__).parents[2], capture_output=True, text=True
    )
    assert "libascendcl.so" in run.stdout and "set_env.sh" in run.stdout, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("home", "said"),
    [
        (None, "ASCEND_HOME_PATH is not set"),
        ("/nowhere/latest", "ASCEND_HOME_PATH=/nowhere/latest, which is no folder"),
        ("/tmp", "ASCEND_HOME_PATH=/tmp"),
    ],
)
def test_where_cann_is_said_to_be(monkeypatch, home, said):
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    if home:
        monkeypatch.setenv("ASCEND_HOME_PATH", home)
    assert ascend.cann() == said


def test_a_torch_npu_of_another_torch_is_refused(monkeypatch):
    monkeypatch.setattr(ascend.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(ascend, "missing_libraries", lambda: [])
    releases = {"torch": "2.13.0+cpu", "torch_npu": "2.11.0.post3"}
    monkeypatch.setattr(ascend.importlib.metadata, "version", releases.get)
    assert "torch_npu 2.11.0.post3 does not fit torch 2.13.0+cpu" in ascend.missing()
    releases["torch_npu"] = "2.13.0"
    assert ascend.unavailable().startswith("torch_npu cannot be imported (No module named 'torch_npu')")


def test_a_cache_that_is_allocated_as_said_gives_two_contiguous_ones():
    storage = torch.arange(2 * 3 * 16 * 2 * 8).view(2, 3, 16, 2, 8)
    key_cache, value_cache = _cache.caches(storage.permute(1, 3, 2, 0, 4))
    assert torch.equal(key_cache, storage[0]) and torch.equal(value_cache, storage[1])
    assert key_cache.data_ptr() == storage.data_ptr() and key_cache.is_contiguous() and value_cache.is_contiguous()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_packed_cache_is_refused_by_name(layout):
    cache = poisoned_cache(layout, 3, 2, 16, torch.empty(16))
    with pytest.raises(ValueError, match=r"in one piece each: allocate it as \[2, num_blocks"):
        _cache.caches(cache)
    key = torch.zeros(1, 2, 8)
    problem = ops.reshape_and_cache.problem_for(key, key, cache, torch.zeros(1, dtype=torch.int64))
    assert "must have the split layout" in _cache.supports(problem)


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros(3, 2, 16, 2, 8),
        torch.zeros(2, 3, 16, 2, 12)[..., :8].permute(1, 3, 2, 0, 4),
        torch.zeros(2, 3, 5, 16, 2, 8)[:, :, 1].permute(1, 3, 2, 0, 4),
        torch.zeros(3, 16, 2, 2, 8).permute(0, 2, 1, 3, 4),
        torch.zeros(2, 3, 2, 16, 8).permute(1, 2, 3, 0, 4),
        torch.zeros(2, 6, 16, 2, 8)[:, ::2].permute(1, 3, 2, 0, 4),
    ],
    ids=["contiguous", "padded rows", "layers interleaved", "keys beside values", "heads first", "every other block"],
)
def test_a_split_cache_that_lies_otherwise_is_refused_by_the_call(cache):
    assert cache.shape == (3, 2, 16, 2, 8)
    with pytest.raises(ValueError, match="does not hold keys and values in one piece each"):
        _cache.caches(cache)
    _cache.caches(poisoned_cache(SPLIT_KV, 3, 2, 16, torch.empty(16)))


@pytest.mark.parametrize(
    ("soc", "operators", "dtype", "reason"),
    [
        ("A2", {"npu::npu_swiglu"}, torch.bfloat16, None),
        ("A2", {"atb::npu_swiglu"}, torch.bfloat16, "torch_npu has no npu_swiglu here"),
        ("A5", {"npu::npu_swiglu"}, torch.bfloat16, "npu_swiglu is documented for A2, A3, not for A5"),
        ("A2", {"npu::npu_swiglu"}, torch.float64, "npu_swiglu takes float32, bfloat16, float16, not float64"),
    ],
)
def test_an_operator_is_refused_by_the_problems_target_alone(soc, operators, dtype, reason):
    problem = Problem("npu", dtype, target=Target("huawei", soc, frozenset(operators)))
    found = _constraints.refused("npu_swiglu", problem)
    assert found == reason or found.startswith(f"{reason}: ")


@pytest.mark.parametrize(
    ("shape", "word"),
    [
        ((8, 2, 128, 128), None),
        ((8, 2, 64, 128), None),
        ((8, 2, 80, 128), "head sizes"),
        ((8, 2, 128, 16), "--block-size 128"),
        ((128, 1, 64, 128), "of a KV head"),
        ((512, 512, 128, 128), "up to 256 heads"),
    ],
)
def test_shapes_that_documents_agree_on(shape, word):
    reason = _constraints.attention(*shape)
    assert reason is None if word is None else word in reason


@pytest.mark.parametrize(
    ("limit", "sizes", "word"),
    [
        ("gating_softmax", (128, 8), None),
        ("gating_softmax", (2000, 1025), "1 to 1024"),
        ("gating", (256, 8, 8, 4), None),
        ("gating", (160, 6, 1, 1), None),
        ("gating", (2049, 8, 1, 1), "up to 2048"),
        ("gating", (8, 2, 4, 2), "groups of 3 experts or more"),
        ("gating", (1040, 8, 80, 4), "not 80 groups of 13"),
        ("gating", (256, 8, 7, 4), "equal groups"),
        ("gating", (64, 33, 4, 2), "of 32"),
        ("grouped_matmul", (1024, 65535), None),
        ("grouped_matmul", (1025, 64), "1 to 1024 experts"),
        ("grouped_matmul", (8, 65536), "up to 65535"),
        ("quant_matmul", (65535, 65535), None),
        ("quant_matmul", (4096, 151936), "not 4096 by 151936"),
    ],
)
def test_sizes_that_documents_allow(limit, sizes, word):
    reason = getattr(_constraints, limit)(*sizes)
    assert reason is None if word is None else word in reason


def npu(dtype: torch.dtype = torch.bfloat16, soc: str = "A2") -> dict:
    """The first fields of a problem on an NPU that has every operator."""
    operators = frozenset(f"npu::{name}" for name in _constraints.OPERATORS)
    return {"device": "npu", "dtype": dtype, "target": Target("huawei", soc, operators)}


PER_TOKEN = Quantised(INT8, PER_ROW)
SIZES = {"num_experts": 128, "hidden_size": 2048, "intermediate_size": 768}
FEATURES = {"in_features": 4096, "out_features": 4096}


@pytest.mark.parametrize(
    ("op", "name", "fields", "word"),
    [
        (ops.route, "ascend", {"num_experts": 128, "top_k": 8}, None),
        (ops.route, "ascend", {"num_experts": 128, "top_k": 8, "bias": True}, "neither sigmoids, biases nor groups"),
        (ops.route, "ascend_gating_top_k", {"num_experts": 256, "top_k": 8, "bias": True, "num_expert_group": 8}, None),
        (ops.route, "ascend_gating_top_k", {"num_experts": 2, "top_k": 1}, "groups of 3"),
        (ops.fused_experts, "ascend", SIZES, None),
        (ops.fused_experts, "ascend", SIZES | {"scheme": Scheme(PER_TOKEN, PER_TOKEN)}, None),
        (ops.fused_experts, "ascend", SIZES | {"scheme": Scheme(PER_TOKEN)}, "serves int8 per row by int8 per row"),
        (ops.fused_experts, "ascend", SIZES | {"num_experts": 2000}, "1 to 1024 experts"),
        (ops.linear, "ascend", FEATURES | {"scheme": Scheme(PER_TOKEN, PER_TOKEN)}, None),
        (ops.linear, "ascend", FEATURES, "PyTorch's own operator"),
        (ops.linear, "ascend", FEATURES | {"scheme": Scheme(PER_TOKEN)}, "int8 by int8"),
        (ops.quantise, "ascend", {"to_dtype": INT8, "group": PER_ROW, "static": False, "columns": 64}, None),
        (ops.quantise, "ascend", {"to_dtype": FP8, "group": PER_ROW, "static": False, "columns": 64}, "not float8"),
        (ops.quantise, "ascend", {"to_dtype": INT8, "group": PER_ROW, "static": True, "columns": 64}, "not given ones"),
    ],
    ids=str,
)
def test_experts_and_int8_are_refused_with_the_reason(op, name, fields, word):
    kernel = kernels_of(op.name, elsewhere=True)[name]
    reason = kernel.supports(op.problem(**npu(), **fields))
    assert reason is None if word is None else word in reason
    assert "not for A5" in kernel.supports(op.problem(**npu(soc="A5"), **fields)) or word is not None
