"""vLLM's passes over a compiled graph, except those that name operators of vLLM's compiled kernels."""

from torch import fx
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.compilation.passes.vllm_inductor_pass import VllmInductorPass
from vllm.config import VllmConfig


class _Nothing(VllmInductorPass):
    """Replaces vLLM's pass that makes its compiled operators work in place: the graph has no such operators."""

    def __call__(self, graph: fx.Graph) -> None:
        pass


class OpsetPassManager(PostGradPassManager):
    def configure(self, config: VllmConfig) -> None:
        super().configure(config)
        self.fix_functionalization = _Nothing(config)
