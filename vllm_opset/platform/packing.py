"""A worker for models whose kernels may keep weights in a format of their own, and free the originals.

vLLM's methods that save, hash or reset all weights would find empty tensors, so they are refused if a weight is gone.
Weights that vLLM loads again (`reload_weights`), or gets from a trainer (--weight-transfer-config), are packed again.
"""

from collections.abc import Callable

import torch
from vllm.v1.worker.gpu_worker import Worker

from vllm_opset.model import packed_linear
from vllm_opset.platform import expert_loading


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

    @property
    def has_quantised_experts(self) -> bool:
        return self.model_config.is_moe and self.model_config.quantization is not None

    def reload_weights(self, *args, **kwargs) -> None:
        """Raises Refusal for a model of which vLLM would load a part."""
        expert_loading.check_reload(self.model_config)
        self.make_room()
        super().reload_weights(*args, **kwargs)
        self._rebind()

    def make_room(self) -> None:
        """Prepare the models for weights that are about to be loaded again."""

    def start_weight_update(self, *args, **kwargs) -> None:
        """Raises Refusal as `reload_weights` does."""
        expert_loading.check_reload(self.model_config)
        super().start_weight_update(*args, **kwargs)

    def finish_weight_update(self, *args, **kwargs) -> None:
        super().finish_weight_update(*args, **kwargs)
        self._rebind()

    def _rebind(self) -> None:
        """Give opset's kernels the weights that were loaded again. vLLM makes the kernels of fp8 experts anew."""
        for model in self.models:
            packed_linear.refresh(model)
        self.bind_quantised_experts()

    def bind_quantised_experts(self) -> None:
        """Bind those of opset's quantised experts whose weights were just loaded."""
        if self.has_quantised_experts:
            # Imported late: vLLM's module of experts imports thousands of others.
            from vllm_opset.model import quantised_experts

            for model in self.models:
                quantised_experts.bind(model)

    save_sharded_state = _with_weights("save_sharded_state")
    save_tensorized_model = _with_weights("save_tensorized_model")
    compute_weight_checksums = _with_weights("compute_weight_checksums")  # this and the next came with 0.32
    reset_weights = _with_weights("reset_weights")
