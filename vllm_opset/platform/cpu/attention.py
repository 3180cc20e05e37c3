"""opset's attention on a CPU."""

from vllm_opset.attention.backend import OpsetAttentionBackend


class CpuAttentionBackend(OpsetAttentionBackend):
    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Whether the tokens of an image may see each other (`attention/images.py`)."""
        return True
