"""The products of adapters on a CPU, apart from an engine: tests/engine/test_adapters.py has them within one."""

from types import SimpleNamespace

import pytest
import torch
from vllm.lora.layers import LoRAMapping

from vllm_opset.model import adapters

pytestmark = pytest.mark.window

RANK, HIDDEN, VOCABULARY = 4, 16, 24
IDS = [7, 5]  # of the adapters in the two slots


@pytest.fixture
def wrapper():
    """For three requests of 2, 3 and 1 tokens: with adapter 5, with none, and with adapter 7."""
    wrapper = adapters.OpsetPunicaWrapper(64, max_batches=8, device="cpu")
    mapping = LoRAMapping(index_mapping=(5, 5, 0, 0, 0, 7), prompt_mapping=(5, 0, 7), is_prefill=True)
    wrapper.update_metadata(mapping, IDS, len(IDS), VOCABULARY)
    return wrapper


@pytest.fixture
def head():
    """The matrices of an adapted LM head, by slot."""
    return torch.randn(len(IDS), 1, RANK, HIDDEN), torch.randn(len(IDS), 1, VOCABULARY, RANK)


def expected(x: torch.Tensor, slots: list[int | None], head) -> torch.Tensor:
    down, up = (matrices[:, 0] for matrices in head)
    rows = (
        torch.zeros(VOCABULARY) if slot is None else up[slot] @ (down[slot] @ row)
        for row, slot in zip(x, slots, strict=True)
    )
    return torch.stack([*rows])


def logits(wrapper, x: torch.Tensor, head) -> torch.Tensor:
    """What the adapters add to the logits of these rows."""
    y = torch.zeros(len(x), VOCABULARY + 8)  # vLLM pads the vocabulary
    wrapper.add_lora_logits(y, x, *head, 1.0)
    assert not y[:, VOCABULARY:].any()
    return y[:, :VOCABULARY]


def test_logits_of_samples_and_of_prompts_have_the_adapters_of_their_tokens(wrapper, head):
    hidden, slots = torch.randn(6, HIDDEN), [1, 1, None, None, None, 0]
    last = hidden[[1, 4, 5]]
    torch.testing.assert_close(logits(wrapper, last, head), expected(last, [1, None, 0], head))
    for rows in (slice(0, 6), slice(0, 2), slice(1, 4), slice(4, 6)):
        x = hidden[rows]
        torch.testing.assert_close(logits(wrapper, x, head), expected(x, slots[rows], head))


def test_logits_of_unknown_tokens_are_refused_if_an_adapter_changes_them(wrapper, head):
    """Some models scale the hidden states before the LM head, so that they are no slice of a step's."""
    x = torch.randn(6, HIDDEN)[1:3] * 2
    with pytest.raises(RuntimeError, match="leave out prompt_logprobs"):
        logits(wrapper, x, head)
    assert not logits(wrapper, x, [torch.zeros_like(matrices) for matrices in head]).any()


def test_adapters_take_their_memory_before_the_kv_cache_does(monkeypatch):
    from vllm_opset.platform.cpu import worker

    done = []
    manager = SimpleNamespace(modules={"": SimpleNamespace(reset_lora=done.append)}, lora_slots=2)
    monkeypatch.setattr(worker.kv_memory, "budget", lambda *_: done.append("cache"))
    served = object.__new__(worker.OpsetCpuWorker)
    served.vllm_config, served.lora_config, served.get_kv_cache_spec = None, object(), dict
    served.model_runner = SimpleNamespace(get_model=lambda: SimpleNamespace(lora_manager=manager))
    served.determine_available_memory()
    assert done == [0, 1, "cache"]
