"""A worker for models whose kernels may keep weights in a format of their own, and free the originals.

vLLM's methods that save, hash or reset all weights would find empty tensors, so they are refused if a weight is gone.
Weights that vLLM loads again are packed again.
"""

from collections.abc import Callable

import torch
from vllm.v1.worker.gpu_worker import Worker

from vllm_opset.model import packed_linear


def _with_weights(name: str) -> Callable:
    """The Worker's method of that name, which is refused if one of the model's weights is gone."""

    def method(self: Worker, *args, **kwargs):
        for model in self.models:
            packed_linear.need_weights(model)
        return getattr(Worker, name)(self, *args, **kwargs)

    return method


class PackingWorker(Worker):
    """vLLM's worker, for models whose weights may be packed."""

    @property
    def models(self) -> list[torch.nn.Module]:
        """The loaded model, and the one that drafts for it in vLLM's second model runner, if there is one."""
        drafting = getattr(getattr(self.model_runner, "speculator", None), "model", None)
        return [self.model_runner.get_model(), *([] if drafting is None else [drafting])]

    def reload_weights(self, *args, **kwargs) -> None:
        super().reload_weights(*args, **kwargs)
        for model in self.models:
            packed_linear.refresh(model)

    save_sharded_state = _with_weights("save_sharded_state")
    save_tensorized_model = _with_weights("save_tensorized_model")
    compute_weight_checksums = _with_weights("compute_weight_checksums")  # this and the next came with 0.32
    reset_weights = _with_weights("reset_weights")
