"""Workers on a CPU that fuse more or less than its own, so that tests can compare whole models."""

from vllm_opset.model import quantised_inputs
from vllm_opset.model.warm_up import step_of_few_tokens
from vllm_opset.platform.cpu.worker import OpsetCpuWorker


class SeparateWorker(OpsetCpuWorker):
    """A worker whose layers run one after the other."""

    def fuse(self) -> None:
        pass


class FusingWorker(OpsetCpuWorker):
    def fuse(self) -> None:
        self.parameters_before = {name for name, _ in self.model_runner.get_model().named_parameters()}
        super().fuse()

    def lost_parameters(self) -> list[str]:
        """The parameters that no longer have the name that a checkpoint uses for them."""
        return sorted(self.parameters_before - {name for name, _ in self.model_runner.get_model().named_parameters()})


class QuantisingWorker(SeparateWorker):
    """A worker on a CPU whose norms and activations quantise like those on GPUs. Tests set its layers back."""

    def load_model(self, **kwargs) -> None:
        super().load_model(**kwargs)
        step = step_of_few_tokens(self.model_runner)
        quantised_inputs.bind(self.model_runner.get_model(), self.vllm_config, step)
