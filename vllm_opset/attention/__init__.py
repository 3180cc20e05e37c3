"""vLLM's attention backend, built on ops.paged_attention and ops.reshape_and_cache."""

BACKEND = "vllm_opset.attention.backend.OpsetAttentionBackend"


def register(backend: str = BACKEND) -> None:
    """Register opset's backend as `--attention-backend CUSTOM`. The platform names the backend even without this.

    backend: the qualified name of the platform's class.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, backend)
