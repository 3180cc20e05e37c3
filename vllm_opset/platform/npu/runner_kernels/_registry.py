"""The implementations for an NPU. Each module of this folder adds its own."""

from vllm_opset.platform.runner_kernels import COMMON, Registry

REGISTRY = Registry(COMMON)
implements = REGISTRY.implements
