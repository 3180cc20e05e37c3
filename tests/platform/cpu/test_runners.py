"""A request that vLLM's second model runner has no room for is refused before it reaches the engine."""

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from vllm_opset.platform.cpu import runners
from vllm_opset.platform.cpu.platform import OpsetCpuPlatform

pytestmark = pytest.mark.window

# Each item: what fills the room, what is too much for it, and its name.
ROOMS = [
    ({"min_tokens": 1, "stop_token_ids": range(127)}, {"min_tokens": 1, "stop_token_ids": range(128)}, "stop tokens"),
    ({"allowed_token_ids": range(1024)}, {"allowed_token_ids": range(1025)}, "tokens in allowed_token_ids"),
    ({"logit_bias": range(1024)}, {"logit_bias": range(1025)}, "tokens in logit_bias"),
]


def parameters(given: dict) -> SamplingParams:
    values = {name: list(value) if isinstance(value, range) else value for name, value in given.items()}
    if "logit_bias" in values:
        values["logit_bias"] = dict.fromkeys(values["logit_bias"], 1.0)
    return SamplingParams(**values)


@pytest.fixture(autouse=True)
def no_model_ends(monkeypatch):
    """Other tests of this process configure models, whose ends count."""
    monkeypatch.setattr(runners, "_ends", set())


@pytest.mark.parametrize(("full", "too_much", "name"), ROOMS, ids=[name for *_, name in ROOMS])
def test_a_request_without_room_is_refused(full, too_much, name, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    OpsetCpuPlatform.validate_request({}, parameters(full))
    with pytest.raises(VLLMValidationError, match=f"{name}.* has room for .*: give fewer, or start the server with"):
        OpsetCpuPlatform.validate_request({}, parameters(too_much))
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")  # the first runner has room
    OpsetCpuPlatform.validate_request({}, parameters(too_much))


def test_the_ends_of_a_models_answers_need_room(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    full, *_ = ROOMS[0]
    monkeypatch.setattr(runners, "_ends", {5, 500})  # 5 is one of the request's own
    with pytest.raises(VLLMValidationError, match="has 129 stop tokens"):
        OpsetCpuPlatform.validate_request({}, parameters(full))
    OpsetCpuPlatform.validate_request({}, parameters({**full, "min_tokens": 0}))
