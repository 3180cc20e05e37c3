"""vLLM's two model runners on a CPU: which one serves and why, and the requests that the second one has no room for."""

from typing import TYPE_CHECKING

from vllm_opset.platform import compat

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.sampling_params import SamplingParams

SECOND = "Model runner: vLLM's second one (V2), because VLLM_USE_V2_MODEL_RUNNER=1 asks for it"
FIRST = "Model runner: vLLM's first one (V1), because %s"
CURE = "give fewer, or start the server with VLLM_USE_V2_MODEL_RUNNER=0"

# The tokens that end an answer of the models that this process configured. vLLM adds them to a request's stop tokens.
_ends: set[int] = set()


def which(config: "VllmConfig") -> str:
    """The line for the log."""
    if config.use_v2_model_runner:
        return SECOND
    if not compat.replaces_triton_kernels():
        return FIRST % "this release of vLLM cannot replace the second one's Triton kernels"
    return FIRST % "VLLM_USE_V2_MODEL_RUNNER is 0, the default on a CPU"


def remember_ends(model_config: "ModelConfig | None") -> None:
    """Note the tokens that end an answer of this model, because `check_request` is not told the model."""
    if model_config is None:
        return
    ends = model_config.try_get_generation_config().get("eos_token_id", [])
    _ends.update([ends] if isinstance(ends, int) else ends)


def check_request(params: "SamplingParams") -> None:
    """Raise VLLMValidationError, an HTTP 400, if the second runner has no room for the tokens that a request names.

    vLLM would raise in the engine's process, and the engine would end.
    """
    if not (params.min_tokens or params.allowed_token_ids or params.logit_bias):
        return
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.worker.gpu.sample import logit_bias

    # One more for the tokenizer's own end of an answer.
    stops = len(params.all_stop_token_ids | _ends) + 1 if params.min_tokens else 0
    for name, number, room in (
        ("stop tokens with min_tokens", stops, logit_bias.MAX_NUM_STOP_TOKEN_IDS),
        ("tokens in allowed_token_ids", len(params.allowed_token_ids or ()), logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS),
        ("tokens in logit_bias", len(params.logit_bias or ()), logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS),
    ):
        if number > room:
            raise VLLMValidationError(
                f"A request has {number} {name}, and vLLM's second model runner has room for {room}: {CURE}."
            )
