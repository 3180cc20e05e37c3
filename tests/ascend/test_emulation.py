"""The emulation itself: it has torch_npu's schemas, shapes and dtypes, and enforces the documented limits."""

import emulation
import pytest
import torch
from emulation import Limits, UndocumentedCall

from vllm_opset.kernels.ascend import _constraints as documented

X = torch.randn(3, 64, dtype=torch.bfloat16)
MASK = torch.ones(2048, 2048, dtype=torch.int8).triu(1)


@pytest.fixture(autouse=True)
def strict():
    with emulation.mode(Limits.STRICT):
        yield


def test_a_wrong_keyword_does_not_bind():
    with pytest.raises(RuntimeError, match="eps"):
        torch.ops.npu.npu_rms_norm(X, X[0], eps=1e-6)
    with pytest.raises(RuntimeError, match="slot_indices"):
        torch.ops.atb._npu_reshape_and_cache(X, X, X, X, slot_mapping=X)


def test_an_operator_that_is_not_emulated_does_not_run():
    assert "npu::npu_mish" not in emulation.OPERATORS
    with pytest.raises(NotImplementedError):
        torch.ops.npu.npu_mish(X)


def test_an_emulation_that_names_parameters_otherwise_is_refused():
    def npu_swiglu(x, dim=-1): ...

    with pytest.raises(TypeError, match="npu_swiglu takes"):
        emulation.registry.emulates("npu::npu_swiglu")(npu_swiglu)


def test_an_emulation_of_other_shapes_than_torch_npus_is_refused():
    with pytest.raises(AssertionError, match="torch_npu says"):
        emulation.registry._check_result("npu::npu_swiglu", X, (X.float(),))


def test_all_operators_that_are_documented_are_emulated():
    assert {name.split("::")[1] for name in emulation.OPERATORS} == set(documented.OPERATORS)


def test_shapes_and_dtypes_are_checked_by_torch_npu_but_for_atb():
    unchecked = {name for name in emulation.OPERATORS if not emulation.registry.has_meta_kernel(name)}
    assert unchecked and all(name.startswith("atb::") for name in unchecked)


def test_add_rms_norm_rounds_the_sum_before_it_is_normalised():
    x, residual = (torch.randn(4, 256, dtype=torch.bfloat16) for _ in range(2))
    ones = torch.ones(256, dtype=torch.bfloat16)
    y, _, total = torch.ops.npu.npu_add_rms_norm(x, residual, ones)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, torch.ops.npu.npu_rms_norm(total, ones)[0])
    unrounded = torch.ops.npu.npu_rms_norm(x.float() + residual.float(), ones.float())[0]
    assert (y != unrounded.bfloat16()).any()


def test_an_operator_is_refused_where_it_is_not_documented():
    with emulation.mode(Limits.STRICT, "Ascend310P3"), pytest.raises(UndocumentedCall, match="not for 310P"):
        torch.ops.npu.npu_swiglu(X)


def test_calls_are_counted():
    with emulation.mode(Limits.STRICT) as calls:
        torch.ops.npu.npu_swiglu(X)
    assert calls == {"npu::npu_swiglu": 1}


def attention(query, key, value, **changes):
    arguments = {
        "atten_mask": MASK, "actual_seq_lengths": [3, 7], "actual_seq_lengths_kv": [3, 7], "num_heads": 4,
        "num_key_value_heads": 2, "scale": 0.125, "input_layout": "TND", "sparse_mode": 3,
    }  # fmt: skip
    return torch.ops.npu.npu_fused_infer_attention_score(query, key, value, **(arguments | changes))[0]


def packed(dtype=torch.bfloat16) -> list[torch.Tensor]:
    return [torch.randn(7, heads, 64, dtype=dtype) for heads in (4, 2, 2)]


def test_causal_attention_is_torchs():
    query, key, value = packed()
    out = attention(query, key, value)
    for rows in (slice(0, 3), slice(3, 7)):
        q, k, v = (x[rows].float().transpose(0, 1) for x in (query, key, value))
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.125, enable_gqa=True)
        torch.testing.assert_close(out[rows].float(), want.transpose(0, 1), rtol=2**-7, atol=1e-2)


def test_fp32_is_let_through_only_where_that_is_said():
    with pytest.raises(UndocumentedCall, match="takes bfloat16"):
        attention(*packed(torch.float32))
    with emulation.mode(Limits.RELAXED):
        attention(*packed(torch.float32))


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"actual_seq_lengths": [3, 4]}, "must end at row 7"),
        ({"actual_seq_lengths": [7, 3]}, "must not fall"),
        ({"atten_mask": None}, "want a mask"),
        ({"atten_mask": torch.zeros_like(MASK)}, "upper triangle"),
        ({"atten_mask": MASK.float()}, "bool, int8"),
        ({"num_heads": 2}, "num_heads"),
    ],
)
def test_undocumented_attention(changes, limit):
    with pytest.raises(UndocumentedCall, match=limit):
        attention(*packed(), **changes)


def test_strided_keys_are_undocumented():
    query, key, value = packed()
    both = torch.cat((key, value), dim=-1)
    with pytest.raises(UndocumentedCall, match="contiguous"):
        attention(query, *both.chunk(2, dim=-1))


def caches(block_size=16) -> list[torch.Tensor]:
    return [torch.zeros(4, block_size, 2, 64, dtype=torch.bfloat16) for _ in range(2)]


@pytest.mark.parametrize(
    ("slots", "limit"),
    [
        (torch.tensor([3, 1, -1], dtype=torch.int32), "must lie in"),
        (torch.tensor([3, 1, 64], dtype=torch.int32), "must lie in"),
        (torch.tensor([3, 1, 3], dtype=torch.int32), "one slot"),
    ],
)
def test_undocumented_slots(slots, limit):
    key, value = torch.randn(2, 3, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(UndocumentedCall, match=limit):
        torch.ops.npu.npu_scatter_pa_kv_cache(key, value, *caches(), slots, cache_mode="Norm")


def test_int64_slots_are_undocumented_for_atb():
    key, value = torch.randn(2, 3, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(UndocumentedCall, match="int32"):
        torch.ops.atb._npu_reshape_and_cache(key, value, *caches(), torch.tensor([3, 1, 0]))


def test_top_k_keeps_ties_and_top_p_the_likeliest():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0], [0.0, 0.0, 0.0, 9.0]])
    kept = torch.ops.npu.npu_top_k_top_p(logits, None, torch.tensor([2, 1], dtype=torch.int32)).isfinite()
    assert kept.tolist() == [[False, True, True, True], [False, False, False, True]]
    kept = torch.ops.npu.npu_top_k_top_p(logits, torch.tensor([0.1, 0.0]), None).isfinite()
    assert kept.tolist() == [[False, True, False, False], [False, False, False, True]]


@pytest.mark.parametrize("k", [0, 1025])
def test_undocumented_k(k):
    with pytest.raises(UndocumentedCall, match="k lies in"):
        torch.ops.npu.npu_top_k_top_p(torch.randn(1, 2000), None, torch.tensor([k], dtype=torch.int32))


def test_geglu_activates_the_right_half_unless_told_otherwise():
    x = torch.tensor([[1.0, -2.0]])
    gelu = torch.nn.functional.gelu
    right = torch.ops.npu.npu_geglu(x, approximate=0)[0]
    left = torch.ops.npu.npu_geglu(x, approximate=0, activate_left=True)[0]
    torch.testing.assert_close(right, x[:, :1] * gelu(x[:, 1:]))
    torch.testing.assert_close(left, gelu(x[:, :1]) * x[:, 1:])


def grouped(rows=6, **changes):
    arguments = {"group_list": torch.tensor([2, rows]), "split_item": 3, "group_type": 0, "group_list_type": 0}
    x, weight = torch.randn(rows, 8, dtype=torch.bfloat16), torch.randn(2, 8, 4, dtype=torch.bfloat16)
    return torch.ops.npu.npu_grouped_matmul([changes.pop("x", x)], [weight], **(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"group_list": torch.tensor([2, 5])}, "rises to the rows"),
        ({"group_list": torch.tensor([7, 6])}, "rises to the rows"),
        ({"group_list": torch.tensor([2, 6], dtype=torch.int32)}, "int64"),
        ({"split_item": 0}, "one x of two"),
        ({"x": torch.randn(8, 6, dtype=torch.bfloat16).t()}, "x is contiguous"),
        ({"bias": [torch.zeros(2, 4, dtype=torch.bfloat16)]}, "else fp32"),
    ],
)
def test_undocumented_groups(changes, limit):
    grouped()
    with pytest.raises(UndocumentedCall, match=limit):
        grouped(**changes)


def routing(expert_idx, **changes):
    arguments = {
        "expert_num": 4, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True, "active_expert_range": [0, 3]
    }  # fmt: skip
    x = torch.arange(2 * len(expert_idx), dtype=torch.bfloat16).view(-1, 2)
    return torch.ops.npu.npu_moe_init_routing_v2(
        x, torch.tensor(expert_idx, dtype=torch.int32), **(arguments | changes)
    )


def test_routing_copies_the_tokens_of_active_experts_in_their_order():
    rows, row_idx, counts, _ = routing([[2, 0], [3, 0], [1, 2]])
    assert row_idx.tolist() == [3, 0, -1, 1, 2, 4] and counts.tolist() == [2, 1, 2]
    assert rows[:5, 0].tolist() == [0, 2, 4, 0, 4] and rows[5].isnan().all()


def test_routing_quantises_each_token():
    rows, _, _, scales = routing([[2], [0]], quant_mode=1)
    assert rows.tolist() == [[85, 127], [0, 127]] and scales.tolist() == pytest.approx([3 / 127, 1 / 127])


@pytest.mark.parametrize(
    ("changes", "limit"),
    [({"expert_num": 2}, "0 … expert_num"), ({"active_num": 1}, "no choice"), ({"quant_mode": 0}, "-1 or 1")],
)
def test_undocumented_routing(changes, limit):
    with pytest.raises(UndocumentedCall, match=limit):
        routing([[2, 0], [3, 0]], **changes)
    with pytest.raises(UndocumentedCall, match="below expert_num"):
        routing([[-1]])


def test_finalizing_reads_indices_by_columns_or_by_rows():
    rows, weights = torch.tensor([[1.0], [2.0], [4.0], [8.0]]), torch.tensor([[1.0, 10.0], [100.0, 1000.0]])
    index = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    sums = [torch.ops.npu.npu_moe_finalize_routing(rows, None, None, None, weights, index, None, m) for m in (0, 2)]
    assert [x.flatten().tolist() for x in sums] == [[41.0, 8200.0], [21.0, 8400.0]]


def test_the_scores_of_groups_are_a_maximum_or_the_sum_of_two():
    logits = torch.tensor([[4.0, -9.0, -9.0, 3.0, 3.0, -9.0]])
    modes = ({"group_select_mode": 0}, {"group_select_mode": 1, "norm_type": 1})
    chosen = [torch.ops.npu.npu_moe_gating_top_k(logits, 1, group_count=2, **how)[1] for how in modes]
    assert [ids.tolist() for ids in chosen] == [[[0]], [[3]]]


@pytest.mark.parametrize(
    ("columns", "changes", "limit"),
    [
        (2049, {}, "up to 2048"),
        (8, {"group_count": 4}, "groups of 3 experts or more"),
        (1040, {"group_count": 80}, "padded to multiples of 32"),
        (12, {"group_count": 4, "k": 4}, "4 experts cannot be chosen of 3"),
        (8, {"bias": torch.zeros(8, dtype=torch.bfloat16)}, "of x's dtype"),
        (8, {"renorm": 1}, "renorm is 0"),
    ],
)
def test_undocumented_gating(columns, changes, limit):
    with pytest.raises(UndocumentedCall, match=limit):
        torch.ops.npu.npu_moe_gating_top_k(torch.randn(3, columns), **({"k": 2} | changes))


def test_int8_is_multiplied_exactly_and_the_bias_comes_after_the_scales():
    x, weight = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((3, 64), (5, 64)))
    scale, tokens, bias = torch.rand(5), torch.rand(3), torch.randn(5, dtype=torch.bfloat16)
    out = torch.ops.npu.npu_quant_matmul(
        x, weight.t(), scale, pertoken_scale=tokens, bias=bias, output_dtype=torch.bfloat16
    )
    want = (x.double() @ weight.double().t()) * scale * tokens[:, None] + bias
    torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=1e-3)
    with pytest.raises(UndocumentedCall, match="takes bfloat16, float16, not float32"):
        torch.ops.npu.npu_quant_matmul(x, weight.t(), scale, pertoken_scale=tokens, output_dtype=torch.float32)
