"""Faults in the calls of torch_npu's operators, which must change the engine's answers or stop the engine."""

import asking
import pytest
from test_faults import (
    FUSED_ATTENTION,
    Faulty,
    eps_for_epsilon,
    int64_slots,
    no_mask,
    pages_of_other_requests,
    pre_tokens_off_by_one,
    strided_keys_and_values,
)

WRITE = "atb::_npu_reshape_and_cache"


def halves_of_the_cache_swapped(given: dict) -> dict:
    return {"key_cache": given["value_cache"], "value_cache": given["key_cache"]}


def slots_in_another_order(given: dict) -> dict:
    return {"slot_indices": given["slot_indices"].flip(0)}


CHANGES_TOKENS = [
    ("qwen3", FUSED_ATTENTION, no_mask),
    ("mistral", FUSED_ATTENTION, pre_tokens_off_by_one),
    ("qwen3", FUSED_ATTENTION, pages_of_other_requests),
    ("qwen3", WRITE, halves_of_the_cache_swapped),
    ("qwen3", WRITE, slots_in_another_order),
]
STOPS = [
    (FUSED_ATTENTION, strided_keys_and_values, "contiguous"),
    (WRITE, int64_slots, "slots must be int32"),
    ("npu::npu_rms_norm", eps_for_epsilon, "eps"),
]


@pytest.fixture(scope="module")
def models_and_answers(tmp_path_factory):
    """A folder with the model, and the answers of transformers."""
    made = {}
    for name in {name for name, *_ in CHANGES_TOKENS}:
        folder = tmp_path_factory.mktemp(name)
        made[name] = folder, asking.expected(asking.build(name, folder), asking.prompts())
    return made


@pytest.mark.parametrize(
    ("name", "operator", "change"), CHANGES_TOKENS, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_fault_changes_the_answers(name, operator, change, engine, relaxed, models_and_answers):
    folder, expected = models_and_answers[name]
    with engine(folder, max_num_batched_tokens=160) as llm:
        with Faulty(operator, change) as faulty:
            answers = asking.tokens(llm, asking.prompts())
        assert faulty.met and answers != expected
        llm.reset_prefix_cache()
        assert asking.tokens(llm, asking.prompts()) == expected, "without the fault"


@pytest.mark.parametrize(("operator", "change", "said"), STOPS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_fault_stops_the_engine(operator, change, said, engine, relaxed, models_and_answers):
    folder, _ = models_and_answers["qwen3"]
    with engine(folder) as llm, Faulty(operator, change), pytest.raises(Exception, match=said):
        asking.tokens(llm, asking.prompts()[:1])
