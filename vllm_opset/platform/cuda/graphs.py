"""Which graphs are captured where no compiler cuts a model into pieces: decode whole, all other steps in pieces.

Between the pieces, of what vLLM calls breakable graphs, each layer's attention is launched for the step at hand. A
variable of vLLM's asks for them, which is set here and taken back before the next engine is configured: it also
switches torch.compile off.
"""

import os
from typing import TYPE_CHECKING

from vllm_opset.platform import refusals

if TYPE_CHECKING:
    from vllm.config import CUDAGraphMode, VllmConfig

VARIABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"

_set_here = False


def default(config: "VllmConfig") -> "CUDAGraphMode":
    """What is captured without a compiler, unless a user says otherwise."""
    from vllm.config import CUDAGraphMode

    pools = config.model_config is not None and config.model_config.runner_type == "pooling"
    if pools or refusals.wants_quick_start(config):
        return CUDAGraphMode.NONE
    # The copies of an offloaded layer would begin in one piece and end in another.
    if refusals.offloads(config) or os.environ.get(VARIABLE) == "0":
        return CUDAGraphMode.FULL_DECODE_ONLY
    return CUDAGraphMode.FULL_AND_PIECEWISE


def ask_for_pieces(config: "VllmConfig") -> None:
    """Sets vLLM's variable, unless a user has, if this configuration captures pieces and has no compiler."""
    global _set_here
    from vllm.config import CompilationMode

    compilation = config.compilation_config
    graphs = default(config) if compilation.cudagraph_mode is None else compilation.cudagraph_mode
    uncompiled = compilation.mode in (None, CompilationMode.NONE)
    if uncompiled and graphs.has_piecewise_cudagraphs() and VARIABLE not in os.environ:
        os.environ[VARIABLE], _set_here = "1", True


def take_back() -> None:
    """Before another engine is configured: it may have a compiler."""
    global _set_here
    if _set_here and os.environ.get(VARIABLE) == "1":
        del os.environ[VARIABLE]
    _set_here = False
