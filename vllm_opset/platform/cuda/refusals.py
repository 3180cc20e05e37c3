"""What opset does not do on NVIDIA GPUs with a vLLM that has no compiled kernels."""

from typing import TYPE_CHECKING

from vllm_opset.platform.refusals import RULES as COMMON
from vllm_opset.platform.refusals import Rule

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FP8 = ("fp8", "fp8_e4m3")


def _caches_in_another_dtype(config: "VllmConfig") -> bool:
    same = () if config.model_config is None else (str(config.model_config.dtype).removeprefix("torch."),)
    return config.cache_config.cache_dtype not in ("auto", *same, *FP8)


RULES: tuple[Rule, ...] = (
    *COMMON,
    Rule(
        "speculative decoding with a model that drafts",
        'give --speculative-config with {"method": "ngram"}, or leave it out',
        lambda config: config.speculative_config is not None and config.speculative_config.method != "ngram",
    ),
    Rule(
        "a KV cache in this dtype",
        "leave out --kv-cache-dtype, or give fp8_e4m3",
        _caches_in_another_dtype,
    ),
)
