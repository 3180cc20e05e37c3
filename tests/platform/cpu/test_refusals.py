"""Unsupported features are refused in one line that names the feature and the cure."""

import functools

import pytest
import torch
import torchvision_stand_in
from settings_table import refused_variables
from small_models import GPT_OSS, LLAMA, SMALL

from vllm_opset.platform import multimodal
from vllm_opset.platform.cpu import threads
from vllm_opset.platform.cpu.refusals import DRAFTS, EARLY_RULES, RULES
from vllm_opset.platform.refusals import Refusal, check

pytestmark = pytest.mark.window

DEEPSEEK = {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    **SMALL,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
}
MIXTRAL = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], **SMALL, "num_local_experts": 4}
MAMBA = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], **SMALL, "state_size": 16}
WHISPER = {
    "model_type": "whisper",
    "architectures": ["WhisperForConditionalGeneration"],
    "vocab_size": 320,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_target_positions": 448,
    "torch_dtype": "float32",
}
RNJ1 = {
    "model_type": "gemma3_text",
    "architectures": ["Rnj1ForCausalLM"],
    **SMALL,
    "layer_types": ["chunked_attention", "full_attention"],
    # Some releases of transformers look the kind of a layer up here.
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("chunked_attention", "full_attention")
    },
    "sliding_window": 64,
}
MIMO_V2 = LLAMA | {"architectures": ["MiMoV2FlashForCausalLM"], "head_dim": 24, "v_head_dim": 16}
OTHER_VALUES_IN_WINDOWS = {"v_head_dim": 24, "swa_head_dim": 24, "swa_v_head_dim": 16}
PANGU = LLAMA | {"architectures": ["PanguEmbeddedForCausalLM"], "param_sink_number": 128, "v_channels": 16}
BACKENDS = {"linear_backend": "cutlass", "moe_backend": "triton"}
FP8 = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
FP8_AND_MXFP4 = {"quantization_config": FP8["quantization_config"] | {"store_dtype": "mxfp4"}}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FP8_CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False}
FP8_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
DENSE = {"format": "dense", "global_sparsity": 0.14, "sparsity_structure": "unstructured", "targets": []}
INT8_CHANNEL = {"num_bits": 8, "type": "int", "strategy": "channel", "dynamic": False}
INT8_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
INT8_TENSOR = INT8_CHANNEL | {"strategy": "tensor"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "dynamic": False}


def compressed(weights: dict, activations: dict | None, **settings: dict) -> dict:
    """The quantization_config of compressed-tensors, in a model's configuration."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    layout = {4: "pack-quantized", 8: f"{weights['type']}-quantized"}[weights["num_bits"]]
    config = {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}
    return {"quantization_config": config | settings}


def test_what_is_supported_is_configured(configure):
    config = configure(LLAMA)
    assert config.parallel_config.worker_cls == "vllm_opset.platform.cpu.worker.OpsetCpuWorker"
    assert config.scheduler_config.async_scheduling is False


@pytest.mark.parametrize(
    "quantised",
    [
        FP8,
        compressed(FP8_CHANNEL, FP8_TOKEN),
        compressed(FP8_CHANNEL, FP8_TOKEN, sparsity_config=DENSE),
        compressed(INT8_CHANNEL, INT8_TOKEN),
    ],
    ids=["fp8", "fp8 of compressed-tensors", "fp8 that was searched for zeros", "int8"],
)
@pytest.mark.parametrize("model", [LLAMA, MIXTRAL], ids=["dense", "experts"])
def test_weights_of_eight_bits_are_not_refused(model, quantised, configure):
    assert configure(model | quantised, dtype="bfloat16").model_config.quantization is not None


@pytest.mark.parametrize(
    "quantised",
    [
        compressed(INT4 | {"symmetric": False, "actorder": "static"}, None),
        {"quantization_config": AWQ},
        {"quantization_config": GPTQ | {"dynamic": {"-:.*mlp.*": {}, "+:.*attn.*": {"group_size": 64}}}},
        {"quantization_config": GPTQ | {"group_size": -1, "desc_act": True}},
    ],
    ids=["int4", "awq", "gptq", "gptq, one group in any order"],
)
def test_weights_of_four_bits_are_not_refused(quantised, configure):
    assert configure(LLAMA | quantised, dtype="bfloat16").model_config.quantization is not None


def test_mxfp4_weights_of_gpt_oss_are_not_refused(configure):
    """vLLM sets a captured step for this model, which must not be taken for a user's."""
    config = configure(GPT_OSS | MXFP4, dtype="float32")
    assert type(config.quant_config).__name__ == "OpsetMxfp4Config"
    assert config.compilation_config.max_cudagraph_capture_size in (None, 0)
    with pytest.raises(Refusal, match="--max-cudagraph-capture-size"):
        configure(GPT_OSS, compilation_config={"max_cudagraph_capture_size": 1024})


def test_expert_parallelism_is_not_refused(configure):
    assert configure(MIXTRAL, enable_expert_parallel=True).parallel_config.enable_expert_parallel


def test_adapters_are_not_refused(configure):
    assert configure(LLAMA, enable_lora=True).lora_config is not None


def test_what_changes_nothing_is_not_refused(configure, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    config = configure(LLAMA, async_scheduling=True, compilation_config={"cudagraph_mode": "NONE"})
    assert config.scheduler_config.async_scheduling is False


@pytest.mark.parametrize(
    ("feature", "cure", "model", "arguments"),
    [
        ("latent attention", "choose another model", DEEPSEEK, {}),
        (
            "returning the chosen experts",
            "--enable-return-routed-experts",
            LLAMA,
            {"enable_return_routed_experts": True},
        ),
        ("state-space", "choose another model", MAMBA, {}),
        ("encoder-decoder", "choose another model", WHISPER, {}),
        ("quantised weights with the method .*mxfp4", "gpt-oss with experts in MXFP4", LLAMA | MXFP4, {}),
        ("--quantization fp8 for gpt-oss", "leave out --quantization", GPT_OSS, {"quantization": "fp8"}),
        ("AWQ's layout gemv", "int4 by groups", LLAMA | {"quantization_config": AWQ | {"version": "gemv"}}, {}),
        ("int4 weights in groups of 16", "int4 by groups", LLAMA | compressed(INT4 | {"group_size": 16}, None), {}),
        ("int4 weights for quantised activations", "int4 by groups", LLAMA | compressed(INT4, INT8_TOKEN), {}),
        (
            "8-bit int channel weights for asymmetric 8-bit int token activations",
            "symmetric int8",
            LLAMA | compressed(INT8_CHANNEL, INT8_TOKEN | {"symmetric": False}),
            {},
        ),
        (
            "8-bit float channel weights for unquantised activations",
            "fp8 e4m3",
            LLAMA | compressed(FP8_CHANNEL, None),
            {},
        ),
        (
            "experts of 8-bit float tensor weights for 8-bit float token activations",
            "fp8 e4m3",
            MIXTRAL | compressed(FP8_CHANNEL | {"strategy": "tensor"}, FP8_TOKEN),
            {},
        ),
        (
            "experts of 8-bit int tensor weights for 8-bit int tensor activations",
            "in symmetric int8 with scales per channel (linear layers also per tensor)",
            MIXTRAL | compressed(INT8_TENSOR, INT8_TENSOR),
            {},
        ),
        ("experts in mxfp4", "fp8 e4m3", MIXTRAL | FP8_AND_MXFP4, {}),
        (
            "quantised weights with a kv_cache_scheme",
            "fp8 e4m3",
            LLAMA | compressed(FP8_CHANNEL, FP8_TOKEN, kv_cache_scheme=FP8_TOKEN),
            {},
        ),
        (
            "quantised weights with a sparsity_config",
            "fp8 e4m3",
            LLAMA | compressed(FP8_CHANNEL, FP8_TOKEN, sparsity_config=DENSE | {"format": "sparse-24-bitmask"}),
            {},
        ),
        ("LoRA", "--enable-lora", MIXTRAL, {"enable_lora": True}),
        ("pipeline parallelism", "--tensor-parallel-size", LLAMA, {"pipeline_parallel_size": 2}),
        ("data parallelism", "--tensor-parallel-size", LLAMA, {"data_parallel_size": 2}),
        (
            "decode context parallelism",
            "--tensor-parallel-size",
            LLAMA | {"num_key_value_heads": 1},
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        ),
        ("KV connectors", "--kv-transfer-config", LLAMA, {"kv_transfer_config": "example connector"}),
        ("KV cache in another dtype", "--kv-cache-dtype", LLAMA, {"kv_cache_dtype": "fp8"}),
        ("fp64 sampling noise", "--use-fp64-gumbel", LLAMA, {"use_fp64_gumbel": True}),
        ("chunks that look back", "choose another model", RNJ1, {}),
        ("windows of generated tokens", "choose another model", LLAMA | {"rswa_window": 128}, {}),
        ("square-root ALiBi", "choose another model", LLAMA | {"architectures": ["Step1ForCausalLM"]}, {}),
        ("keys and values of different sizes", "choose another model", MIMO_V2, {}),
        ("keys and values of different sizes", "choose another model", MIMO_V2 | OTHER_VALUES_IN_WINDOWS, {}),
        ("keys and values of different sizes", "choose another model", PANGU, {}),
        ("prompt embeddings", "--enable-prompt-embeds", LLAMA, {"enable_prompt_embeds": True}),
        ("fast prefill", "--kv-sharing-fast-prefill", LLAMA, {"kv_sharing_fast_prefill": True}),
        ("weight offloading", "--cpu-offload-gb", LLAMA, {"cpu_offload_gb": 1}),
        ("torch.compile", "--enforce-eager", LLAMA, {"compilation_config": {"mode": 3}}),
        ("CUDA graphs", "--compilation-config", LLAMA, {"compilation_config": {"cudagraph_mode": "FULL"}}),
        ("torch.compile and CUDA graphs", "--cudagraph-capture-sizes", LLAMA, {"cudagraph_capture_sizes": [1]}),
        (
            "the compiler's passes",
            "--compilation-config.pass_config.fuse_norm_quant",
            LLAMA,
            {"compilation_config": {"pass_config": {"fuse_norm_quant": True}}},
        ),
        ("optimisation levels 1 and 3", "--optimization-level", LLAMA, {"optimization_level": 3}),
        (
            "vLLM's own attention kernels",
            "--attention-config.flash_attn_version",
            LLAMA,
            {"attention_config": {"flash_attn_version": 3}},
        ),
        ("vLLM's own kernels", "leave out --moe-backend and --linear-backend", LLAMA, BACKENDS),
        ("NUMA nodes", "start under numactl", LLAMA, {"numa_bind": True}),
        ("choosing devices", "--device-ids", LLAMA, {"device_ids": [0]}),
        ("sleep mode", "--enable-sleep-mode", LLAMA, {"enable_sleep_mode": True}),
        ("CuMem allocator", "--enable-cumem-allocator", LLAMA, {"enable_cumem_allocator": True}),
        ("profilers other than PyTorch's", '{"profiler": "torch"}', LLAMA, {"profiler_config": {"profiler": "cuda"}}),
        ("NVTX", "--enable-layerwise-nvtx-tracing", LLAMA, {"enable_layerwise_nvtx_tracing": True}),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_refused_with_the_cure(feature, cure, model, arguments, configure, monkeypatch):
    torchvision_stand_in.install(monkeypatch)
    if arguments.get("kv_transfer_config"):
        from vllm.config import KVTransferConfig

        arguments = {"kv_transfer_config": KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")}
    # pydantic wraps the exception of a configuration; the line is the same.
    with pytest.raises(Exception, match=feature) as refusal:
        configure(model, **arguments)
    (line,) = [line for line in str(refusal.value).splitlines() if "vllm-opset" in line]
    assert cure in line


@pytest.mark.parametrize(
    "model", [RNJ1 | {"layer_types": ["full_attention"] * 2}, MIMO_V2 | {"v_head_dim": 24}, LLAMA | {"v_head_dim": 24}]
)
def test_models_with_usual_attention_are_not_refused(model, configure):
    configure(model)


@pytest.mark.parametrize(
    ("found", "model"),
    [
        ("GPTQ with zero points", LLAMA | {"quantization_config": GPTQ | {"sym": False}}),
        ("8-bit GPTQ", LLAMA | {"quantization_config": GPTQ | {"bits": 8, "sym": False}}),
        ("GPTQ's activation ordering by groups", LLAMA | {"quantization_config": GPTQ | {"desc_act": True}}),
        ("8-bit AWQ", LLAMA | {"quantization_config": AWQ | {"bits": 8}}),
        ("int4 weights with activation ordering by groups", MIXTRAL | compressed(INT4 | {"actorder": "group"}, None)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_weights_that_vllm_refuses_without_a_cure_are_refused_with_it(found, model, configure):
    said = f"vllm-opset on a CPU does not support quantised weights with {found}.*: choose a checkpoint"
    with pytest.raises(Exception, match=said):
        configure(model, dtype="bfloat16")


@pytest.mark.parametrize(
    ("feature", "variable"),
    [
        ("batch invariance", "VLLM_BATCH_INVARIANT"),
        ("binding threads", "VLLM_CPU_OMP_THREADS_BIND"),
        ("reserving cores", "VLLM_CPU_NUM_OF_RESERVED_CPU"),
        ("FlashInfer's sampler", "VLLM_USE_FLASHINFER_SAMPLER"),
        ("tensor descriptors", "VLLM_TRITON_USE_TD"),
        ("kernels of vLLM's own CPU platform", "VLLM_CPU_ATTN_SPLIT_KV"),
        ("simulated routing of experts", "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"),
        ("activations that vLLM's Marlin kernels quantise", "VLLM_MARLIN_INPUT_DTYPE"),
    ],
)
def test_environment_is_refused(feature, variable, configure, monkeypatch):
    monkeypatch.setenv(variable, refused_variables("cpu")[variable])
    with pytest.raises(Exception, match=f"{feature}.*: unset {variable}"):
        configure(LLAMA)


def test_binding_all_threads_to_one_core_is_refused(configure, monkeypatch):
    monkeypatch.setattr(threads, "are_bound", lambda: True)
    with pytest.raises(Exception, match=r"binding all threads to one core by OpenMP.*: unset OMP_PROC_BIND"):
        configure(LLAMA)


@pytest.mark.parametrize(
    ("feature", "attribute", "value"),
    [
        # vLLM itself refuses these, here or for such a model, unless someone sets them later.
        ("cascade attention", "model_config.disable_cascade_attn", False),
        ("encoder-decoder models", "model_config.is_encoder_decoder", True),
        ("weight transfer", "weight_transfer_config", object()),
        ("diffusion models", "diffusion_config", object()),
        ("watermarks", "watermark_config", object()),
        ("encoder cache connectors", "ec_transfer_config", object()),
        ("KV cache offloading", "cache_config.kv_offloading_size", 1.0),
        ("batch-sharded sampling", "parallel_config.enable_batch_sharded_sampling", True),
        ("prefill context parallelism", "parallel_config.prefill_context_parallel_size", 2),
        ("several machines", "parallel_config.nnodes", 2),
        ("DBO", "parallel_config.enable_dbo", True),
        ("sampling masks", "model_config.return_sampling_mask", True),
        ("trace replay", "model_config.enable_trace_replay", True),
        ("balancing experts", "parallel_config.enable_eplb", True),
        ("Ray", "parallel_config.distributed_executor_backend", "ray"),
    ],
)
def test_refused_where_vllm_lets_it_pass(feature, attribute, value, configure):
    config = configure(LLAMA)
    *path, name = attribute.split(".")
    idle = [rule for rule in (*EARLY_RULES, *RULES) if not rule.applies(config)]
    # This bypasses the checks of pydantic, which would require other settings as well.
    object.__setattr__(functools.reduce(getattr, path, config), name, value)
    with pytest.raises(Refusal, match=feature):
        check(idle, config, "here")


def test_a_layout_of_the_cache_is_refused_where_no_attention_is_asked(configure, monkeypatch):
    """Covers both cases, whatever this release does, since the supported releases include both."""
    from vllm_opset.platform import early_rules

    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")
    for found, refused in ((None, True), (object(), False)):
        monkeypatch.setattr(early_rules.importlib.util, "find_spec", lambda name, found=found: found)
        assert early_rules.CACHE_LAYOUT.applies(None) == refused


def test_every_rule_is_tested():
    tested = [
        case[0]
        for test in (
            test_refused_with_the_cure,
            test_environment_is_refused,
            test_refused_where_vllm_lets_it_pass,
        )
        for mark in test.pytestmark
        if mark.name == "parametrize"
        for case in mark.args[1]
    ]
    tested += ["another layout of the KV cache", "second model runner", "quantised weights", "binding all threads"]
    # test_draft_refusals.py and test_multimodal.py have these.
    rules = [rule for rule in EARLY_RULES + RULES if rule not in DRAFTS + multimodal.RULES]
    untested = [rule.feature for rule in rules if not any(feature in rule.feature for feature in tested)]
    assert not untested


def test_other_attention_backends_are_refused(configure):
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    config = configure(LLAMA, attention_backend="TRITON_ATTN")
    with set_current_vllm_config(config), pytest.raises(NotImplementedError, match="leave out --attention-backend"):
        get_attn_backend(32, torch.float32, "auto")


def test_what_would_end_a_worker_ends_the_configuration(configure, monkeypatch):
    kernels = {"opset": {"kernels": {"rms_norm": "triton"}}}
    with pytest.raises(ValueError, match=r"asks for rms_norm=triton, which runs on cuda, not on cpu\. Remove"):
        configure(LLAMA, additional_config=kernels)
    monkeypatch.setenv("OPSET_NUM_THREADS", "x")
    with pytest.raises(ValueError, match="OPSET_NUM_THREADS='x' is neither a number of threads nor 'auto'"):
        configure(LLAMA)
    monkeypatch.delenv("OPSET_NUM_THREADS")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "nan")
    with pytest.raises(ValueError, match="VLLM_CPU_KVCACHE_SPACE='nan' is no number of GiB"):
        configure(LLAMA)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    with pytest.raises(ValueError, match="unknown part 'atention'"):
        configure(LLAMA, additional_config={"opset": {"native": {"atention": "on"}}})
