"""The features that a vision tower adds to the first layers of its text tower (deepstack), as in Qwen3-VL."""

import functools
import importlib.util
from pathlib import Path

from torch import nn

from vllm_opset.platform.bridges import patch

QWEN3_VL = "vllm.model_executor.models.qwen3_vl"
CLEAR = "_clear_deepstack_input_embeds"


def _model_clears() -> bool:
    """Whether vLLM's model clears the features. Its source is read, because its import may need torchvision."""
    found = importlib.util.find_spec(QWEN3_VL)
    return found is not None and CLEAR in Path(found.origin).read_text()


@patch(
    _model_clears,
    ends="vLLM clears these features where it prepares a step, also when a graph replays the model",
    worker=("cuda",),
    always=True,  # models without such features are left as they are
)
def clear_features_before_each_step(model: nn.Module) -> None:
    """Clear the features of the last step's images before vLLM embeds the tokens of the next step.

    The features are in a buffer, whose rows are the tokens of a step. vLLM fills it where a step has images, and clears
    it at the end of the model's forward. If a graph replays the forward, this code does not run. Later steps would then
    add the features to other tokens. vLLM replays prompts in piecewise graphs without a compiler. It replays one token
    left of a prompt in graphs of decode steps.

    Parameters: model is one that was just loaded. vLLM calls its method `embed_input_ids` in every step.
    """
    if not hasattr(model, CLEAR):
        return
    embed, clear = model.embed_input_ids, getattr(model, CLEAR)

    @functools.wraps(embed)
    def clear_and_embed(*args, **kwargs):
        clear(getattr(model, "deepstack_input_embeds_num_tokens", 0))
        return embed(*args, **kwargs)

    model.embed_input_ids = clear_and_embed
