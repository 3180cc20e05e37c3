"""The implementations for a CPU. Each module of this folder adds its own."""

from vllm_opset.platform.runner_kernels import COMMON, Registry

REGISTRY = Registry(COMMON)
implements = REGISTRY.implements
# Kernels that only an engine with drafts launches. The modules of some do not exist before vLLM 0.32.
DRAFTS = Registry()
implements_for_drafts = DRAFTS.implements
