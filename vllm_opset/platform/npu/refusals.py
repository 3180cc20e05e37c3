"""The features that opset does not support on Ascend NPUs."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_opset.kernels.ascend._constraints import ATTENTION_BLOCK_SIZES
from vllm_opset.model.weights import offloads
from vllm_opset.platform import second_runner
from vllm_opset.platform.early_rules import EARLY_RULES as COMMON_EARLY_RULES
from vllm_opset.platform.early_rules import GRAPHS, NVTX, PROFILERS, SIMULATED_ROUTING, WITHOUT_COMPILER
from vllm_opset.platform.multimodal import MULTIMODAL
from vllm_opset.platform.quantised_weights import rule, stored_weights, unserved
from vllm_opset.platform.refusals import (
    EXPERT_PARALLELISM,
    MERGE_ADAPTER,
    VALUES_APART,
    Rule,
    Settings,
    caches_in_another_dtype,
    captures,
    compiles,
    given,
    of_model,
    several,
)
from vllm_opset.platform.refusals import RULES as COMMON

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

# The method of quantisation of which some formats are served.
METHOD = "compressed-tensors"


def _has_another_block_size(config: "VllmConfig") -> bool:
    cache = config.cache_config
    return cache.user_specified_block_size and cache.block_size not in ATTENTION_BLOCK_SIZES


def _captures_more_than_decode(config: "VllmConfig") -> bool:
    from vllm.config import CUDAGraphMode

    return captures(config) and config.compilation_config.cudagraph_mode != CUDAGraphMode.FULL_DECODE_ONLY


def _unserved_weights(model: "ModelConfig") -> Iterator[str]:
    """Names what is not served of a model's quantised weights: all but int8 by int8 (W8A8)."""
    yield from unserved(model)
    if model.quantization not in (None, METHOD):
        yield f"the method {model.quantization}"
    for name, weights in stored_weights(model).items():
        if (weights.get("type"), weights.get("num_bits")) != ("int", 8):
            yield f"{weights.get('num_bits')}-bit {weights.get('type')} weights ({name} of compressed-tensors)"


QUANTISED_WEIGHTS = rule(
    "quantised weights other than int8",
    "choose a checkpoint in float32, bfloat16 or float16, or one of compressed-tensors with symmetric int8 weights and "
    "activations (W8A8), per tensor or per channel, or with experts per channel and per token",
    _unserved_weights,
)


# These are checked before vLLM resolves the configuration, because resolving it overrides what users set.
EARLY_RULES: tuple[Rule | Settings, ...] = (
    *COMMON_EARLY_RULES,
    Settings("torch.compile", "compilation_config", except_for=WITHOUT_COMPILER | GRAPHS),
    Settings(
        "settings of graph capture without a cudagraph_mode",
        "compilation_config",
        except_for=WITHOUT_COMPILER,
        unless=captures,
    ),
    Rule(
        "graph capture of steps other than decode steps",
        'give --compilation-config \'{"cudagraph_mode": "FULL_DECODE_ONLY"}\', or leave cudagraph_mode out',
        _captures_more_than_decode,
    ),
    Rule(
        "graph capture of pooling models",
        "leave cudagraph_mode out of --compilation-config",
        lambda config: captures(config) and of_model(lambda model: model.runner_type == "pooling")(config),
    ),
    Rule(
        "another block size of the KV cache",
        f"leave out --block-size, or give {' or '.join(map(str, ATTENTION_BLOCK_SIZES))}",
        _has_another_block_size,
    ),
    Rule(
        "choosing devices by their numbers",
        "leave out --device-ids, and set ASCEND_RT_VISIBLE_DEVICES",
        lambda config: config.parallel_config.assigned_physical_gpu_ids is not None,
    ),
    *SIMULATED_ROUTING,
    PROFILERS,
    NVTX,
)

RULES: tuple[Rule, ...] = (
    QUANTISED_WEIGHTS,
    *COMMON,
    MULTIMODAL,
    VALUES_APART,
    EXPERT_PARALLELISM,
    second_runner.UNAVAILABLE,
    Rule("adapters (LoRA)", MERGE_ADAPTER, given("lora_config")),
    Rule("weight offloading", "leave out --cpu-offload-gb and --offload-*, or take a smaller model", offloads),
    Rule("speculative decoding", "leave out --speculative-config", given("speculative_config")),
    # opset has not been run on two NPUs yet.
    Rule("tensor parallelism", "leave out --tensor-parallel-size, and use one NPU", several("tensor_parallel_size")),
    Rule("torch.compile", "leave the mode out of --compilation-config, or give --enforce-eager", compiles),
    Rule("a KV cache in another dtype than the model's", "leave out --kv-cache-dtype", caches_in_another_dtype),
)
