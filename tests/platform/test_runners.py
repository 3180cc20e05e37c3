"""vLLM chooses its model runner, the log says why, and requests that the second one has no room for are refused."""

import os
import sys
from types import SimpleNamespace

import processes
import pytest
from small_models import LLAMA
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from vllm_opset.platform import base, runners, second_runner
from vllm_opset.platform.base import OpsetPlatform
from vllm_opset.platform.cpu.platform import OpsetCpuPlatform
from vllm_opset.platform.cuda.platform import OpsetCudaPlatform
from vllm_opset.platform.npu.platform import OpsetNpuPlatform

pytestmark = pytest.mark.window

# Each item: what fills the room, what is too much for it, and its name.
ROOMS = [
    ({"min_tokens": 1, "stop_token_ids": range(127)}, {"min_tokens": 1, "stop_token_ids": range(128)}, "stop tokens"),
    ({"allowed_token_ids": range(1024)}, {"allowed_token_ids": range(1025)}, "tokens in allowed_token_ids"),
    ({"logit_bias": range(1024)}, {"logit_bias": range(1025)}, "tokens in logit_bias"),
]


@pytest.fixture(autouse=True)
def no_other_engines(monkeypatch):
    """Other tests of this process configure models, whose ends count."""
    monkeypatch.setattr(runners, "_served", [])


@pytest.fixture
def chooses(configure, monkeypatch):
    """`chooses(variable, model, **arguments)`: the configuration by that value of vLLM's variable, None for none."""

    def chooses(variable: str | None, model: dict = LLAMA, **arguments):
        monkeypatch.delenv(runners.VARIABLE, raising=False)
        if variable is not None:
            monkeypatch.setenv(runners.VARIABLE, variable)
        return configure(model, **arguments)

    return chooses


def why(config, platform: type[OpsetPlatform] = OpsetCpuPlatform) -> str:
    """The line for the log, without its beginning."""
    begins, reason = runners.which(config, platform.why_no_second_runner()).split(", because ")
    assert begins.endswith("second one (V2)" if config.use_v2_model_runner else "first one (V1)")
    return reason


replaced = pytest.mark.skipif(
    not second_runner.replaces_triton_kernels(),
    reason="this vLLM has no hook for the second runner's kernels: runs with 0.31 and later",
)


@replaced
def test_on_a_cpu_the_second_runner_is_the_default(chooses):
    config = chooses(None)
    assert config.use_v2_model_runner and why(config) == "vLLM chooses it by default"
    config = chooses("1")
    assert config.use_v2_model_runner and why(config) == "VLLM_USE_V2_MODEL_RUNNER=1 asks for it"


@replaced
def test_users_may_choose_the_first_runner(chooses):
    config = chooses("0")
    assert not config.use_v2_model_runner and why(config) == "VLLM_USE_V2_MODEL_RUNNER=0 asks for it"


@replaced
def test_what_the_second_runner_lacks_is_left_to_the_first_one(chooses, monkeypatch):
    from vllm.config import VllmConfig

    monkeypatch.setattr(VllmConfig, "_get_v2_model_runner_unsupported_features", lambda config: ["magic", "spells"])
    config = chooses(None)
    assert not config.use_v2_model_runner and why(config) == "vLLM's second one does not support magic, spells"
    monkeypatch.setattr(VllmConfig, "_get_v2_model_runner_unsupported_features", lambda config: [])
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", False)
    assert why(config) == "this release of vLLM chooses it for this model"


def test_the_log_says_which_runner_serves_and_why(chooses, monkeypatch):
    said = []
    monkeypatch.setattr(base.logger, "info_once", lambda form, *values: said.append(form % values))
    config = chooses("0")
    assert said == [runners.which(config, OpsetCpuPlatform.why_no_second_runner())]


@pytest.mark.skipif(second_runner.replaces_triton_kernels(), reason="of releases before 0.31: runs with those")
def test_on_a_cpu_an_older_release_serves_with_the_first_runner(chooses):
    config = chooses(None)
    assert not config.use_v2_model_runner and "cannot replace the Triton kernels" in why(config)
    with pytest.raises(Exception, match=r"second model runner before vLLM 0\.31.*: unset VLLM_USE_V2_MODEL_RUNNER"):
        chooses("1")


@pytest.mark.parametrize("platform", [OpsetCpuPlatform, OpsetCudaPlatform, OpsetNpuPlatform])
def test_the_variable_is_set_where_the_second_runner_cannot_serve(platform, monkeypatch):
    monkeypatch.setenv(runners.VARIABLE, "")  # so that it is removed afterwards
    monkeypatch.delenv(runners.VARIABLE)
    OpsetPlatform.pre_register_and_update.__func__(platform)
    cannot = platform is not OpsetCudaPlatform and not second_runner.replaces_triton_kernels()
    assert os.environ.get(runners.VARIABLE) == ("0" if cannot else None)


def parameters(given: dict) -> SamplingParams:
    values = {name: list(value) if isinstance(value, range) else value for name, value in given.items()}
    if "logit_bias" in values:
        values["logit_bias"] = dict.fromkeys(values["logit_bias"], 1.0)
    return SamplingParams(**values)


class Configuration(SimpleNamespace):
    """What `runners` reads of vLLM's configuration."""


def served(second: bool = True, ends: object = None, drafts: object = None) -> Configuration:
    model = SimpleNamespace(try_get_generation_config=lambda: {} if ends is None else {"eos_token_id": ends})
    config = Configuration(use_v2_model_runner=second, model_config=model, speculative_config=drafts)
    runners.remember(config)
    return config


@pytest.mark.parametrize(("full", "too_much", "name"), ROOMS, ids=[name for *_, name in ROOMS])
def test_a_request_without_room_is_refused(full, too_much, name):
    first = served(second=False)
    OpsetPlatform.validate_request({}, parameters(too_much))  # the first runner has room
    second = served()
    OpsetPlatform.validate_request({}, parameters(full))
    with pytest.raises(VLLMValidationError, match=f"{name}.* has room for .*: give fewer, or start the server with"):
        OpsetPlatform.validate_request({}, parameters(too_much))
    del second  # the engine has ended
    OpsetPlatform.validate_request({}, parameters(too_much))
    assert not first.use_v2_model_runner


@pytest.mark.parametrize(
    ("fits", "too_much", "message"),
    [
        ({"seed": 2**63 - 1}, {"seed": 2**63}, "has the seed 9223372036854775808 .* takes signed seeds of 64 bits"),
        ({"seed": 2**63 - 2, "n": 2}, {"seed": 2**63 - 1, "n": 2}, "the seed 9223372036854775807 and n=2, .* takes"),
        ({"max_tokens": 2**30}, {"max_tokens": 2**31}, "has max_tokens=2147483648, .* takes 1073741824 at most: give"),
    ],
)
def test_a_number_that_the_second_runner_cannot_hold_is_refused(fits, too_much, message):
    OpsetPlatform.validate_request({}, parameters(too_much))  # no second runner serves
    config = served()
    OpsetPlatform.validate_request({}, parameters(fits))
    with pytest.raises(VLLMValidationError, match=message):
        OpsetPlatform.validate_request({}, parameters(too_much))
    assert config.use_v2_model_runner


@pytest.mark.parametrize("name", ["top_k", "seed", "thinking_token_budget", "stream_interval"])
@pytest.mark.parametrize("second", [False, True])
def test_an_integer_that_is_too_long_for_the_engine_is_refused(name, second):
    if name not in SamplingParams.__struct_fields__:
        pytest.skip(f"{name} came with vLLM 0.27: ends when 0.27 is the oldest supported release")
    config = served(second)
    OpsetPlatform.validate_request({}, parameters({name: 2**40}))
    with pytest.raises(VLLMValidationError, match=f"has {name}=18446744073709551616, .* of 64 bits to its engine"):
        OpsetPlatform.validate_request({}, parameters({name: 2**64}))
    assert config.use_v2_model_runner == second


@pytest.mark.parametrize(
    ("values", "name"),
    [({"seed": 2**64 - 1, "n": 2}, r"seed \+ n - 1"), ({"stop_token_ids": [1, 2**64]}, "stop_token_ids")],
)
def test_an_integer_that_vllm_makes_or_that_is_one_of_several_is_refused_as_well(values, name):
    config = served(second=False)
    with pytest.raises(VLLMValidationError, match=f"has {name}=18446744073709551616, .* of 64 bits to its engine"):
        OpsetPlatform.validate_request({}, parameters(values))
    assert not config.use_v2_model_runner


def test_a_seed_may_be_any_integer_that_fits():
    config = served()
    OpsetPlatform.validate_request({}, parameters({"seed": -(2**63)}))
    with pytest.raises(VLLMValidationError, match="has seed=-9223372036854775809"):
        OpsetPlatform.validate_request({}, parameters({"seed": -(2**63) - 1}))
    assert config.use_v2_model_runner


@pytest.mark.parametrize("second", [False, True])
def test_log_probabilities_of_given_tokens_are_refused_where_tokens_are_drafted(second):
    asked = parameters({"logprob_token_ids": [5, 6]})
    without = served(second)
    OpsetPlatform.validate_request({}, asked)
    drafting = served(second, drafts="ngram")
    OpsetPlatform.validate_request({}, parameters({"logprobs": 2}))
    with pytest.raises(VLLMValidationError, match=r"has logprob_token_ids, .* ask for logprobs, or start"):
        OpsetPlatform.validate_request({}, asked)
    del drafting  # the engine has ended
    OpsetPlatform.validate_request({}, asked)
    assert without.speculative_config is None


class Tokenizer:
    """It makes a token of each word."""

    max_token_id = 1 << 20

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [int(word) for word in text.split()]


@pytest.mark.parametrize(
    ("fits", "too_much", "name"),
    [
        (["1 " * 1024], ["1 " * 1025], "1025 tokens in bad_words"),
        (["1 " * 512, "2 " * 512], ["1 " * 512, "2 " * 513], "1025 tokens in bad_words"),
    ],
)
def test_bad_words_without_room_are_refused_when_they_are_tokens(fits, too_much, name):
    OpsetCpuPlatform.prepare()
    SamplingParams(bad_words=too_much).update_from_tokenizer(Tokenizer())  # no second runner serves
    config = served()
    SamplingParams(bad_words=fits).update_from_tokenizer(Tokenizer())
    with pytest.raises(VLLMValidationError, match=f"{name}, .* has room for 1024: give fewer, or start the server"):
        SamplingParams(bad_words=too_much).update_from_tokenizer(Tokenizer())
    assert config.use_v2_model_runner


@pytest.mark.parametrize("ends", [0, 500, [5, 500]])
def test_the_ends_of_a_models_answers_need_room(ends):
    full = {"min_tokens": 1, "stop_token_ids": range(1, 128)}  # 5 is one of the request's own
    config = served(ends=ends)
    with pytest.raises(VLLMValidationError, match="has 129 stop tokens"):
        OpsetPlatform.validate_request({}, parameters(full))
    OpsetPlatform.validate_request({}, parameters({**full, "min_tokens": 0}))
    assert config.use_v2_model_runner


COMPILE = """
import torch
from vllm_opset.platform import second_runner
second_runner.name_cpu_as_cuda()
print(torch.compile(torch.nn.functional.relu, backend="eager")(torch.tensor([-1.0, 2.0])).tolist())
"""


def test_torch_compile_runs_beside_the_second_runner_on_a_cpu():
    """Some of vLLM's models, such as Cohere's, compile a function whatever the configuration."""
    ran = processes.run(sys.executable, "-c", COMPILE)
    assert ran.out.strip().endswith("[0.0, 2.0]"), ran
