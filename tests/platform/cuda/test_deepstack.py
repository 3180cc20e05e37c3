"""The features of images that a step leaves in a model's buffer, if a graph replays the step."""

from types import SimpleNamespace

import pytest
import torch

from vllm_opset.platform import deepstack

pytestmark = pytest.mark.window


class Deepstack(torch.nn.Module):
    """As vLLM's model of Qwen3-VL: `forward` clears the features that `embed_input_ids` has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.deepstack_input_embeds_num_tokens = torch.zeros(4), 0

    def embed_input_ids(self, features: list[float]) -> int:
        if features:
            self.kept[: len(features)] = torch.tensor(features)
            self.deepstack_input_embeds_num_tokens = len(features)
        return len(features)

    def _clear_deepstack_input_embeds(self, num_tokens: int) -> None:
        self.kept[:num_tokens] = 0


def test_features_of_a_step_that_a_graph_replayed_are_gone_in_the_next_one():
    """A replay runs no forward, which would clear them."""
    model = Deepstack()
    deepstack.clear_features_before_each_step(model)
    for features, kept in (([1, 2, 3], [1, 2, 3, 0]), ([4], [4, 0, 0, 0]), ([], [0] * 4)):
        assert model.embed_input_ids(features) == len(features)
        assert model.kept.tolist() == kept


def test_other_models_keep_their_method():
    embed = object()
    model = SimpleNamespace(embed_input_ids=embed)
    deepstack.clear_features_before_each_step(model)
    assert model.embed_input_ids is embed
