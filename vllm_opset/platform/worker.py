"""The base class of workers on opset's platforms: vLLM's own worker, with opset's layers in its model."""

from contextlib import AbstractContextManager, nullcontext

from vllm.config import set_current_vllm_config
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_opset.model import last_layer, layers
from vllm_opset.model.warm_up import step_of_few_tokens
from vllm_opset.platform import compat, expert_loading, model_settings
from vllm_opset.platform.packing import PackingWorker
from vllm_opset.platform.report import Reporting

logger = init_logger(f"vllm.{__name__}")


class OpsetWorker(Reporting, PackingWorker):
    def load_model(self, **kwargs) -> None:
        self.read_rows = last_layer.ReadRows()
        compat.forget_shared_layers()
        model_settings.take_back()  # vLLM copies the configuration for a draft model
        if not self.vllm_config.use_v2_model_runner:
            from vllm_opset.platform.v1 import input_batch

            input_batch.keep_allowed_tokens_apart()
        if self.model_config.is_moe:
            # Imported late: vLLM's module of experts imports thousands of others.
            from vllm_opset.model import experts

            experts.register()
            expert_loading.refuse_unserved_experts()
            expert_loading.check_shapes(self.model_config)
        super().load_model(**kwargs)
        layers.check_positions(self.model_runner.get_model(), self.model_config.max_model_len)
        self.bind_quantised_experts()
        with set_current_vllm_config(self.vllm_config):
            for model in self.models:
                layers.bind(model, self.model_config.dtype)

    def leave_out_rows(self) -> None:
        """Let last layers compute only what vLLM reads: see `last_layer`. Call it when all else has its final form."""
        step = step_of_few_tokens(self.model_runner)
        for model in self.models:
            last_layer.bind(model, self.vllm_config, self.read_rows, step)

    def execute_model(self, scheduler_output: SchedulerOutput):
        self.read_rows.before_step(scheduler_output)
        return super().execute_model(scheduler_output)

    def make_room(self) -> None:
        if self.has_quantised_experts:
            from vllm_opset.model import quantised_experts

            for model in self.models:
                quantised_experts.make_room(model)

    # An HTTP client may ask a server in development mode for the next three, also without --enable-sleep-mode.

    def sleep(self, level: int = 1) -> None:
        """Free nothing: see `_maybe_get_memory_pool_context`. vLLM's own worker for CPUs does the same."""
        logger.warning("Weights and KV cache stay in memory: vllm-opset %s has no sleep mode", current_platform.where)

    def discard(self, tags: tuple[str, ...]) -> None:
        """Free nothing, like `sleep`. vLLM calls it from 0.31 on, and then treats the engine as asleep."""
        self.sleep()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Do nothing, because nothing was freed."""

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager:
        """No pool: memory comes from the system or PyTorch. vLLM's pool allocators are for its own platforms."""
        return nullcontext()
