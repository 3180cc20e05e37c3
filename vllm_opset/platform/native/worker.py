"""vLLM's own worker on a GPU, with those parts of opset that are on."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.logger import init_logger
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_opset.kernels.triton._constants import assume_unchanged
from vllm_opset.kernels.triton._precompile import precompile
from vllm_opset.model import fusion, layers, linear, registration
from vllm_opset.platform import compat, compile_cache, expert_loading, model_settings, quantised_weights, refusals
from vllm_opset.platform.cuda import device, warm_up
from vllm_opset.platform.cuda.starting import Starting
from vllm_opset.platform.native import parts
from vllm_opset.platform.native.rules import IN_THE_MODEL
from vllm_opset.platform.packing import PackingWorker

logger = init_logger(f"vllm.{__name__}")


class OpsetNativeWorker(Starting, PackingWorker):
    def __init__(self, vllm_config: VllmConfig, *args, **kwargs) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self.parts = set(parts.kept(vllm_config))

    def load_model(self, **kwargs) -> None:
        compat.forget_shared_layers()
        model_settings.take_back()  # vLLM copies the configuration for a draft model
        if "moe" in self.parts:
            expert_loading.check_shapes(self.model_config)
        with ExitStack() as building:
            if "sampler" in self.parts and self.will_draw():
                building.enter_context(warm_up.draws_meanwhile(self))
            if "ops" in self.parts:
                building.enter_context(_opset_layers())
            if "linear" in self.parts and self.model_config.quantization is not None:
                building.enter_context(quantised_weights.linear_kernels_first())
            if "moe" in self.parts and self.model_config.quantization is not None:
                building.enter_context(quantised_weights.replaced_expert_methods(self.vllm_config))
            super().load_model(**kwargs)
        if "ops" in self.parts:
            layers.check_positions(self.model_runner.get_model(), self.model_config.max_model_len)
        for model in self.models:
            self._bind(model)
        if self.parts & {"linear", "ops", "moe"}:
            compile_cache.keep_kernels_apart(self.vllm_config)
        if "sampler" in self.parts:
            if self.install_sampler():
                with precompile():
                    warm_up.sampler(self.model_runner)
            else:
                self.parts.remove("sampler")

    def _bind(self, model: torch.nn.Module) -> None:
        """Let the parts that are on serve a model that was just loaded."""
        if "ops" in self.parts:
            with set_current_vllm_config(self.vllm_config):
                layers.bind(model, self.model_config.dtype)
            fusion.bind(model, self.vllm_config, precompile)
        if "linear" in self.parts:
            linear.bind(model, compiled=refusals.compiles(self.vllm_config))
        if "moe" in self.parts:
            self._bind_experts(model)

    def _bind_experts(self, model: torch.nn.Module) -> None:
        # Imported late: vLLM's module of experts imports thousands of others.
        from vllm_opset.model import bound_experts

        with set_current_vllm_config(self.vllm_config):
            kept = bound_experts.bind(model)
        for reason, number in kept.items():
            logger.info("vLLM's own experts serve %d layers, since vllm-opset's do not support %s", number, reason)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        self.check_choices()
        with device.named_out_of_memory():
            if self.parts & IN_THE_MODEL:
                warm_up.model(self)
            if "sampler" in self.parts:
                warm_up.sampler(self.model_runner)
            times = super().compile_or_warm_up_model()
        assume_unchanged()
        return times


@contextmanager
def _opset_layers() -> Iterator[None]:
    """Within this context, models are built with opset's layers. Another engine of this process may need vLLM's."""
    registration.register()
    try:
        yield
    finally:
        registration.unregister()
