"""The features that opset does not support on NVIDIA GPUs with a vLLM that has no compiled kernels."""

import torch

from vllm_opset.model.weights import offloads
from vllm_opset.platform import draft_rules, drafts, multimodal
from vllm_opset.platform.early_rules import EARLY_RULES as COMMON_EARLY_RULES
from vllm_opset.platform.early_rules import GRAPHS, SIMULATED_ROUTING, WITHOUT_COMPILER, asks_to_compile, unset
from vllm_opset.platform.quantised_weights import FP8_OF_GPT_OSS, GPT_OSS, QUANTISED_WEIGHTS
from vllm_opset.platform.refusals import (
    ADAPTED_EXPERTS,
    Rule,
    Settings,
    caches_neither_alike_nor_in_fp8,
    captures,
    compiles,
    has_experts,
    of_model,
)
from vllm_opset.platform.refusals import RULES as COMMON

is_quantised = of_model(lambda model: model.quantization is not None)


# These are checked before vLLM resolves the configuration, because resolving it overrides what users set.
EARLY_RULES: tuple[Rule | Settings, ...] = (
    *COMMON_EARLY_RULES,
    Settings(
        "settings of torch.compile without a mode in --compilation-config",
        "compilation_config",
        except_for=WITHOUT_COMPILER | GRAPHS,
        unless=asks_to_compile,
    ),
    *unset("all-reduce over symmetric memory", "VLLM_ALLREDUCE_USE_SYMM_MEM"),
    *unset("estimating the memory of CUDA graphs", "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS"),
    *SIMULATED_ROUTING,
)

# No GPU has tried these together.
WITH_IMAGES: tuple[Rule, ...] = (
    Rule(
        "quantised weights of multimodal models",
        "take a checkpoint that is not quantised",
        lambda config: is_quantised(config) and multimodal.MULTIMODAL.applies(config),
    ),
    Rule(
        "torch.compile for multimodal models",
        "leave the mode out of --compilation-config",
        lambda config: compiles(config) and multimodal.MULTIMODAL.applies(config),
    ),
    Rule(
        "offloading the weights of multimodal models",
        "leave out --offload-*, or use --tensor-parallel-size",
        lambda config: offloads(config) and multimodal.MULTIMODAL.applies(config),
    ),
    Rule(
        "CUDA graphs of multimodal models other than Llava, Gemma-3, Qwen2.5-VL and Qwen3-VL",
        "leave cudagraph_mode out of --compilation-config",
        lambda config: captures(config) and of_model(multimodal.may_keep_images)(config),
    ),
    Rule(
        "encoders of images that workers share by images",
        "leave out --mm-encoder-tp-mode",
        multimodal.if_set(lambda mm: mm.mm_encoder_tp_mode == "data"),
    ),
    Rule(
        "decoding videos on the engine's GPU",
        "leave out --mm-ipc-gpu-memory-gb",
        multimodal.if_set(lambda mm: mm.mm_ipc_gpu_memory_gb),
    ),
)

RULES: tuple[Rule, ...] = (
    QUANTISED_WEIGHTS,
    FP8_OF_GPT_OSS,
    *COMMON,
    *multimodal.RULES,
    *WITH_IMAGES,
    ADAPTED_EXPERTS,
    Rule(
        "offloading the weights of mixtures of experts",
        "leave out --offload-*, or use --tensor-parallel-size",
        lambda config: has_experts(config) and offloads(config),
    ),
    draft_rules.ANOTHER_METHOD,
    Rule(
        "a model that drafts with vLLM's first model runner",
        "unset VLLM_USE_V2_MODEL_RUNNER, take a release whose second one has the method, or draft by ngram",
        lambda config: drafts.method(config) in drafts.MODELS and not config.use_v2_model_runner,
    ),
    draft_rules.QUANTISED_OTHERWISE,
    Rule(
        "another backend or LM head for a model that drafts",
        f"leave {', '.join(draft_rules.BACKENDS)} out of --speculative-config",
        lambda config: draft_rules.differs(config, draft_rules.BACKENDS),
    ),
    Rule(
        "a KV cache in a dtype other than fp8 e4m3 for a model that drafts",
        "leave kv_cache_dtype out of --speculative-config, or give fp8_e4m3",
        lambda config: draft_rules.differs(config, ["kv_cache_dtype"], (None, "auto", "fp8", "fp8_e4m3")),
    ),
    Rule(
        "a KV cache in a dtype other than the model's and fp8 e4m3",
        "leave out --kv-cache-dtype, or give fp8_e4m3",
        caches_neither_alike_nor_in_fp8,
    ),
    Rule(
        "MXFP4 weights in a model whose dtype is not bfloat16",
        "leave out --dtype, or give bfloat16",
        of_model(lambda model: model.quantization == GPT_OSS and model.dtype is not torch.bfloat16),
    ),
    Rule(
        "offloading of quantised weights",
        "leave out --offload-*",
        lambda config: is_quantised(config) and offloads(config),
    ),
    Rule(
        "weight offloading by a view of the host's memory (UVA)",
        "leave out --cpu-offload-gb",
        lambda config: config.offload_config.uva.cpu_offload_gb > 0,
    ),
)
