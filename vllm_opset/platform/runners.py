"""Says which of vLLM's two model runners serves and why, and refuses requests whose values it has no room for."""

import weakref
from typing import TYPE_CHECKING

from vllm_opset.platform.refusals import environment

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
SECOND = "Model runner: vLLM's second one (V2), because %s"
FIRST = "Model runner: vLLM's first one (V1), because %s"
# The runner adds the prompt's tokens to max_tokens in 32 bits.
MOST_TOKENS = 2**30

# Each living configuration of this process under which the second runner serves, and the tokens that end an answer of
# its model. vLLM adds them to a request's stop tokens.
_served: list[tuple[weakref.ref, frozenset[int]]] = []
# Each living configuration of this process under which tokens are drafted.
_drafting: list[weakref.ref] = []


def which(config: "VllmConfig", why_no_second: str | None) -> str:
    """The line for the log. why_no_second: why the second runner cannot serve on this platform; None if it can."""
    asked = environment(VARIABLE)
    if config.use_v2_model_runner:
        return SECOND % (f"{VARIABLE}=1 asks for it" if asked else "vLLM chooses it by default")
    if why_no_second:
        return FIRST % why_no_second
    if asked is not None:
        return FIRST % f"{VARIABLE}=0 asks for it"
    if lacking := config._get_v2_model_runner_unsupported_features():
        return FIRST % f"vLLM's second one does not support {', '.join(lacking)}"
    return FIRST % "this release of vLLM chooses it for this model"


def remember(config: "VllmConfig") -> None:
    """Note what the checks of requests need to know of a configuration. vLLM does not tell them a request's engine."""
    _served[:] = [(other, ends) for other, ends in _served if other() is not None]
    _drafting[:] = [other for other in _drafting if other() is not None]
    if config.speculative_config is not None:
        _drafting.append(weakref.ref(config))
    if config.use_v2_model_runner and config.model_config is not None:
        ends = config.model_config.try_get_generation_config().get("eos_token_id")
        tokens = [ends] if isinstance(ends, int) else ends or []
        _served.append((weakref.ref(config), frozenset(tokens)))


def check_integers(params: "SamplingParams") -> None:
    """Raise VLLMValidationError, an HTTP 400, for an integer that vLLM cannot pass to its engine.

    vLLM would raise while it packs the request, and the client would get an HTTP 500 without a message.
    """
    from vllm.exceptions import VLLMValidationError

    asked = {name: getattr(params, name) for name in params.__struct_fields__}
    if params.seed is not None:
        asked["seed + n - 1"] = params.seed + params.n - 1  # the seed of the last answer
    for name, value in asked.items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, int) and not -(2**63) <= one < 2**64:
                raise VLLMValidationError(
                    f"A request has {name}={one}, and vLLM passes integers of 64 bits to its engine: give another."
                )


def check_request(params: "SamplingParams") -> None:
    """Raise VLLMValidationError, an HTTP 400, if the second runner serves and has no room for a request's parameters.

    vLLM would raise in the engine's process, and the engine would end.
    """
    engines = [ends for config, ends in _served if config() is not None]
    if not engines:
        return
    # vLLM adds 1 to the seed for each further answer.
    if params.seed is not None and not -(2**63) <= params.seed <= 2**63 - params.n:
        found = f"A request has the seed {params.seed} and n={params.n}"
        raise _refused(found, "takes signed seeds of 64 bits", "give another")
    if params.max_tokens is not None and params.max_tokens > MOST_TOKENS:
        raise _refused(f"A request has max_tokens={params.max_tokens}", f"takes {MOST_TOKENS} at most", "give fewer")
    if not (params.min_tokens or params.allowed_token_ids or params.logit_bias):
        return
    from vllm.v1.worker.gpu.sample import logit_bias

    # One more for the tokenizer's own end of an answer.
    stops = len(params.all_stop_token_ids.union(*engines)) + 1 if params.min_tokens else 0
    _check_room(
        ("stop tokens with min_tokens", stops, logit_bias.MAX_NUM_STOP_TOKEN_IDS),
        ("tokens in allowed_token_ids", len(params.allowed_token_ids or ()), logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS),
        ("tokens in logit_bias", len(params.logit_bias or ()), logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS),
    )


def check_scores(params: "SamplingParams") -> None:
    """Raise VLLMValidationError, an HTTP 400, for log-probabilities of given tokens where tokens are drafted.

    Both runners of vLLM would leave them out of each step with drafts, without a word.
    """
    if params.logprob_token_ids and any(config() is not None for config in _drafting):
        from vllm.exceptions import VLLMValidationError

        raise VLLMValidationError(
            "A request has logprob_token_ids, and vLLM gives no log-probabilities of given tokens where tokens are "
            "drafted: ask for logprobs, or start the server without --speculative-config."
        )


def check_bad_words(params: "SamplingParams") -> None:
    """Raise VLLMValidationError, an HTTP 400, if the second runner has no room for a request's bad words, as tokens."""
    if not params.bad_words_token_ids or all(config() is None for config, _ in _served):
        return
    from vllm import envs
    from vllm.v1.worker.gpu.sample import bad_words

    def most(name: str) -> int:  # a variable, or a constant in older releases
        return getattr(envs, f"VLLM_{name}", None) or getattr(bad_words, name)

    tokens = sum(map(len, params.bad_words_token_ids))
    _check_room(
        ("bad words", len(params.bad_words_token_ids), most("MAX_NUM_BAD_WORDS")),
        ("tokens in bad_words", tokens, most("MAX_BAD_WORDS_TOTAL_TOKENS")),
    )


def _check_room(*rooms: tuple[str, int, int]) -> None:
    """rooms: what a request has, how many of it, and for how many there is room."""
    for name, number, room in rooms:
        if number > room:
            raise _refused(f"A request has {number} {name}", f"has room for {room}", "give fewer")


def _refused(found: str, room: str, cure: str) -> Exception:
    from vllm.exceptions import VLLMValidationError

    return VLLMValidationError(
        f"{found}, and vLLM's second model runner {room}: {cure}, or start the server with {VARIABLE}=0."
    )
