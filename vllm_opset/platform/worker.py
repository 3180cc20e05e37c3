"""What the workers of opset's platforms have in common: vLLM's own worker, with opset's layers in its model."""

from contextlib import AbstractContextManager, nullcontext

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.logger import init_logger
from vllm.v1.worker.gpu_worker import Worker

from vllm_opset import selection
from vllm_opset.platform import layers, report

logger = init_logger(f"vllm.{__name__}")


class OpsetWorker(Worker):
    def __init__(self, vllm_config: VllmConfig, *args, **kwargs) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        selection.configure(vllm_config.additional_config)
        selection.forget()

    def load_model(self, **kwargs) -> None:
        super().load_model(**kwargs)
        with set_current_vllm_config(self.vllm_config):
            layers.bind(self.model_runner.get_model(), self.model_config.dtype)

    def log_choices(self) -> None:
        """Once the weights are loaded and the layers built, every choice has been made."""
        if self.rank == 0:
            logger.info("%s", report.table())

    def opset_report(self) -> list[dict]:
        """Which kernel serves which op in this worker: `llm.collective_rpc("opset_report")`."""
        return report.rows()

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager:
        """Memory comes from the system or PyTorch; vLLM's pool allocators are for its own platforms."""
        return nullcontext()
