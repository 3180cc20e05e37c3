"""All bridges: vLLM's hooks, the patches, and the differences between releases that need no patch."""

from vllm_opset.platform import (
    compat,
    deepstack,
    expert_loading,
    model_settings,
    quantised_layers,
    quantised_loading,
    second_runner,
)
from vllm_opset.platform.bridges import EVERY, WITHOUT_KERNELS, Bridge, has, lacks, takes, uses
from vllm_opset.platform.v1 import bridges as first

BACKEND = "vllm.v1.attention.backend.AttentionBackend"
RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
OF_NORMS = ("vllm.ir.ops.{0}.impls", "vllm.ir.ops.layernorm.{0}.impls")

# The attributes through which a plugin registers itself.
HOOKS = (
    Bridge(
        "platform",
        "vLLM loads the platform by the entry point `vllm.platform_plugins`, and records where it did.",
        "vllm_opset.platform.activate",
        has("vllm.platforms.resolve_current_platform_cls_qualname"),
        changes=("vllm.platforms._current_platform", "vllm.platforms._init_trace"),
        hook=True,
        loading=EVERY,
    ),
    Bridge(
        "layers",
        "opset registers its layers by `CustomOp.register_oot`, and on stock vLLM only while a model is loaded.",
        "vllm_opset.model.registration.register",
        has("vllm.model_executor.custom_op.op_registry_oot"),
        changes=("vllm.model_executor.custom_op.op_registry_oot",),
        hook=True,
        loading=WITHOUT_KERNELS,
        worker=("native",),
    ),
    Bridge(
        "kernels of quantised layers",
        "opset registers its kernels for fp8, int8 and int4 weights by `register_linear_kernel`, "
        "when such a model is loaded.",
        "vllm_opset.platform.quantised_weights.register",
        has("vllm.model_executor.kernels.linear.register_linear_kernel"),
        changes=tuple(f"vllm.model_executor.kernels.linear._POSSIBLE_{name}KERNELS" for name in ("FP8_", "INT8_", "")),
        hook=True,
        worker=WITHOUT_KERNELS,
    ),
    Bridge(
        "experts",
        "vLLM leaves unquantised experts on a plugin's platform to the plugin. opset registers its method for them by "
        "`CustomOp.register_oot`, for models that have experts.",
        "vllm_opset.model.experts.register",
        has("vllm.model_executor.layers.fused_moe.oracle.unquantized.UnquantizedMoeBackend.OOT"),
        changes=("vllm.model_executor.custom_op.op_registry_oot",),
        hook=True,
        worker=WITHOUT_KERNELS,
    ),
    Bridge(
        "MXFP4 experts",
        "vLLM's method for MXFP4 experts takes one of its own backends, and none runs without compiled kernels. When "
        "gpt-oss is configured, opset registers a configuration for it by `register_quantization_config`. Its experts "
        "have opset's method.",
        "vllm_opset.platform.quantised_weights.configure_mxfp4",
        has("vllm.model_executor.layers.quantization.register_quantization_config"),
        changes=("vllm.model_executor.layers.quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG",),
        hook=True,
        worker=("cpu", "cuda"),
    ),
    Bridge(
        "second registry of layers",
        "The same for vLLM's second registry, of layers that depend on no device.",
        "vllm_opset.model.registration.register",
        has("vllm.model_executor.hw_agnostic.custom_op.op_registry_oot"),
        first=(0, 28),
        changes=("vllm.model_executor.hw_agnostic.custom_op.op_registry_oot",),
        hook=True,
        loading=WITHOUT_KERNELS,
        worker=("native",),
    ),
    Bridge(
        "IR ops",
        "opset is a provider of vLLM's IR ops for norms. vLLM removes its IR after 0.33.",
        "vllm_opset.model.ir.register",
        has("vllm.ir.ops"),
        last=(0, 33),
        changes=tuple(name.format(op) for op in ("rms_norm", "fused_add_rms_norm") for name in OF_NORMS),
        hook=True,
        loading=WITHOUT_KERNELS,
    ),
    Bridge(
        "kernels of the second model runner",
        "vLLM's second model runner launches Triton kernels, and vLLM asks its platform to replace them. opset has "
        "them in NumPy, PyTorch and C++ for a CPU, and in PyTorch for an NPU.",
        "vllm_opset.platform.runner_kernels.Registry.register",
        has(second_runner.OVERRIDES),
        first=(0, 31),
        changes=("vllm.triton_utils.dispatcher._registry",),
        hook=True,
        worker=("cpu", "npu"),
    ),
    Bridge(
        "attention backend",
        "`--attention-backend CUSTOM` selects opset's backend.",
        "vllm_opset.attention.register",
        has("vllm.v1.attention.backends.registry.register_backend"),
        changes=("vllm.v1.attention.backends.registry._ATTN_OVERRIDES",),
        hook=True,
        loading=EVERY,
    ),
)

PATCHING = (
    compat,
    model_settings,
    second_runner,
    quantised_layers,
    quantised_loading,
    expert_loading,
    deepstack,
    *first.PATCHED,
)
PATCHES = (
    *(value.bridge for module in PATCHING for value in vars(module).values() if hasattr(value, "bridge")),
    # Its code is with Triton's kernels, which import nothing of this folder.
    Bridge(
        "precompile",
        "Triton compiles one kernel after the other when they are launched. For a while, a worker's calls of opset's "
        "kernels compile them in several threads and do not launch them. Afterwards the function is Triton's again.",
        "vllm_opset.kernels.triton._precompile.precompile",
        has("triton.runtime.jit.JITFunction.run"),
        ends="Triton offers this for a call",
        changes=("triton.runtime.jit.JITFunction.run",),
        worker=("cuda", "native"),
    ),
)

DIFFERENCES = (
    Bridge(
        "shape of the KV cache",
        "vLLM asks the attention backend for the cache's shape and its order in memory. Later releases decide on the "
        "same shape themselves.",
        "vllm_opset.attention.backend.OpsetAttentionBackend.get_kv_cache_shape",
        has(f"{BACKEND}.get_kv_cache_shape"),
        last=(0, 28),
    ),
    Bridge(
        "layouts of the KV cache",
        "vLLM asks the attention backend which layouts of the cache it takes.",
        "vllm_opset.attention.backend.OpsetAttentionBackend.supported_kv_cache_layouts",
        has(f"{BACKEND}.supported_kv_cache_layouts"),
        first=(0, 29),
    ),
    Bridge(
        "layout that nobody is asked for",
        "VLLM_KV_CACHE_LAYOUT sets a layout without asking the backend, so a user's value is refused.",
        "vllm_opset.platform.early_rules.gives_a_layout_unasked",
        lacks("vllm.v1.kv_cache_layout"),
        last=(0, 28),
    ),
    Bridge(
        "block sizes by the cache's specification",
        "vLLM passes `kv_cache_spec` when it asks for the block sizes of the kernels.",
        "vllm_opset.attention.backend.OpsetAttentionBackend.get_supported_kernel_block_sizes",
        takes(f"{BACKEND}.get_supported_kernel_block_sizes", "kv_cache_spec"),
        first=(0, 31),
    ),
    Bridge(
        "several layers at one place",
        "vLLM asks the platform whether several attention layers may be at one place in the model.",
        "vllm_opset.platform.cuda.platform.OpsetCudaPlatform.check_runner_kv_caches_multi_layer",
        has("vllm.platforms.interface.Platform.check_runner_kv_caches_multi_layer"),
        first=(0, 28),
    ),
    Bridge(
        "groups of layers",
        "The function that groups the layers by block table is in another module.",
        "vllm_opset.platform.cuda.workspace.kv_cache_groups",
        has("vllm.v1.core.kv_cache_planning"),
        first=(0, 33),
    ),
    Bridge(
        "random inputs of the profile run",
        "vLLM passes `randomize_inputs` to the model runner's profile run.",
        "vllm_opset.platform.cuda.workspace.held_while_profiling",
        takes(f"{RUNNER}.profile_run", "randomize_inputs"),
        first=(0, 31),
    ),
    Bridge(
        "LayerNorm as a layer",
        "Models use vLLM's own LayerNorm, which can be replaced. Before, it was a plain module of PyTorch.",
        "vllm_opset.model.layers.LayerNormLayer",
        has("vllm.model_executor.layers.layernorm.LayerNorm.register_oot"),
        first=(0, 32),
    ),
    Bridge(
        "methods that read all weights",
        "Two more methods of vLLM's worker read all weights of a model. They are refused where weights are packed.",
        "vllm_opset.platform.packing.PackingWorker.reset_weights",
        has("vllm.v1.worker.gpu_worker.Worker.reset_weights"),
        first=(0, 32),
    ),
    Bridge(
        "no watermarks",
        "The configuration has no field for watermarks. A rule about a field that is missing applies to nothing.",
        "vllm_opset.platform.refusals.given",
        lacks("vllm.config.VllmConfig.watermark_config"),
        last=(0, 29),
    ),
    Bridge(
        "no sampling masks",
        "The configuration has no field for sampling masks.",
        "vllm_opset.platform.native.rules",
        lacks("vllm.config.ModelConfig.return_sampling_mask"),
        last=(0, 27),
    ),
    Bridge(
        "sequence parallelism",
        "Sequence parallelism needs captured sizes that are multiples of its own number, so sizes stay as vLLM chose.",
        "vllm_opset.platform.cuda.graphs.capture_longer_steps",
        has("vllm.config.compilation.PassConfig.enable_sp"),
        last=(0, 31),
    ),
    Bridge(
        "piecewise graphs, decided late",
        "vLLM reads its variable for piecewise graphs after it asks the platform for its defaults, which set it.",
        "vllm_opset.platform.cuda.platform.OpsetCudaPlatform.apply_config_platform_defaults",
        lacks("vllm.config.VllmConfig._maybe_enable_breakable_cudagraph"),
        last=(0, 28),
    ),
    Bridge(
        "scales of the KV cache",
        "An attention layer may compute the scales of its cache before the cache is written. Its parts are not fused.",
        "vllm_opset.model.fusion.bind",
        uses("vllm.model_executor.layers.attention.attention.Attention.__init__", "calculate_kv_scales"),
        last=(0, 27),
    ),
    Bridge(
        "threads of several workers",
        "vLLM sets OMP_NUM_THREADS for several workers, to 1 up to 0.27. The user's value is kept for the workers.",
        "vllm_opset.platform.cpu.threads.remember_users_choice",
        uses("vllm.v1.executor.multiproc_executor.set_multiprocessing_worker_envs", "OMP_NUM_THREADS"),
        ends="vLLM leaves the variable alone",
    ),
    *first.DIFFERENCES,
)


BRIDGES = (*HOOKS, *PATCHES, *DIFFERENCES)
