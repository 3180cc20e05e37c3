"""A worker on a CPU that fuses as the one on GPUs does, so that this is tried on whole models."""

from vllm_opset.model import fusion
from vllm_opset.platform.cpu.worker import OpsetCpuWorker


class FusingWorker(OpsetCpuWorker):
    def load_model(self, **kwargs) -> None:
        super().load_model(**kwargs)
        self.parameters_before = {name for name, _ in self.model_runner.get_model().named_parameters()}
        fusion.bind(self.model_runner.get_model(), self.vllm_config)

    def lost_parameters(self) -> list[str]:
        """Those that can no longer be found by the name that a checkpoint has for them."""
        return sorted(self.parameters_before - {name for name, _ in self.model_runner.get_model().named_parameters()})
