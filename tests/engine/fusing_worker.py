"""A worker on a CPU that fuses like the worker on GPUs, so that tests can try fusing on whole models."""

from vllm_opset.model import fusion, quantised_inputs
from vllm_opset.model.warm_up import step_of_few_tokens
from vllm_opset.platform.cpu.worker import OpsetCpuWorker


class FusingWorker(OpsetCpuWorker):
    def load_model(self, **kwargs) -> None:
        super().load_model(**kwargs)
        self.parameters_before = {name for name, _ in self.model_runner.get_model().named_parameters()}
        fusion.bind(self.model_runner.get_model(), self.vllm_config)

    def lost_parameters(self) -> list[str]:
        """The parameters that no longer have the name that a checkpoint uses for them."""
        return sorted(self.parameters_before - {name for name, _ in self.model_runner.get_model().named_parameters()})


class QuantisingWorker(OpsetCpuWorker):
    """A worker on a CPU whose norms and activations quantise like those on GPUs."""

    def load_model(self, **kwargs) -> None:
        super().load_model(**kwargs)
        step = step_of_few_tokens(self.model_runner)
        quantised_inputs.bind(self.model_runner.get_model(), self.vllm_config, step)
