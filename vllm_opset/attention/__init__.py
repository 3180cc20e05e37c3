"""vLLM's attention backend, written against ops.paged_attention and ops.reshape_and_cache."""

BACKEND = "vllm_opset.attention.backend.OpsetAttentionBackend"


def register(backend: str = BACKEND) -> None:
    """Makes `--attention-backend CUSTOM` mean opset's. The platform names the backend in any case.

    backend: the qualified name of the platform's class.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, backend)
