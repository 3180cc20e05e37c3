"""The base class of opset's platforms for a vLLM without compiled kernels."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from vllm.logger import init_logger
from vllm.platforms.interface import Platform, PlatformEnum

from vllm_opset import selection
from vllm_opset.attention import BACKEND
from vllm_opset.platform import (
    compat,
    compile_cache,
    forking,
    model_settings,
    multimodal,
    overridden,
    quantised_loading,
    quantised_weights,
    refusals,
    runners,
    switches,
)

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.config.kernel import IrOpPriorityConfig
    from vllm.engine.arg_utils import EngineArgs

logger = init_logger(f"vllm.{__name__}")


class OpsetPlatform(Platform):
    """See `vllm.platforms.interface.Platform` for the meaning of each hook.

    where: the device in words, for error messages.
    early_rules: rules that are checked before vLLM resolves the configuration and overrides what users set.
    rules: rules that are checked after vLLM has resolved it.
    worker: the default of `worker_cls`.
    attention_backend: the qualified name of the backend's class.
    """

    _enum = PlatformEnum.OOT
    where: ClassVar[str]
    early_rules: ClassVar[tuple[refusals.Rule | refusals.Settings, ...]]
    rules: ClassVar[tuple[refusals.Rule, ...]]
    worker: ClassVar[str]
    attention_backend: ClassVar[str] = BACKEND

    def __init__(self) -> None:
        forking.make_safe()

    @classmethod
    def prepare(cls) -> None:
        """Make the changes that every process needs before it configures an engine, or is given a configuration."""
        compat.ask_before_arguments_are_checked(cls.check_arguments)
        quantised_loading.ask_before_quantisation_is_configured(cls.check_quantised_weights)
        compat.ask_when_bad_words_are_tokens(runners.check_bad_words)

    @classmethod
    def why_no_second_runner(cls) -> str | None:
        """Why vLLM's second model runner (V2) cannot serve here, whatever the model; None if it can."""
        return None

    # Configuration

    @classmethod
    def pre_register_and_update(cls, parser=None) -> None:
        if cls.why_no_second_runner():
            os.environ.setdefault(runners.VARIABLE, "0")  # vLLM would choose the second one where it finds Triton
        compat.inspect_models_in_this_process()
        model_settings.take_back()
        compat.ask_before_models_are_imported(_ask_about_multimodal)

    @classmethod
    def check_arguments(cls, arguments: "EngineArgs") -> None:
        """Raise Refusal for arguments of an engine that vLLM would otherwise check first."""
        refusals.check(refusals.ARGUMENTS, arguments, cls.where)

    @classmethod
    def check_quantised_weights(cls, model: "ModelConfig") -> None:
        """Raise Refusal for quantised weights that are not served. vLLM has not read how they are stored yet."""
        quantised_weights.check(cls.rules, model, cls.where)

    @classmethod
    def check_multimodal(cls) -> None:
        """Raise Refusal if no multimodal model can be served. vLLM has not imported the model's module yet."""
        multimodal.check(cls.rules, cls.where)

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: "VllmConfig") -> None:
        # Skipped for a copy of a complete configuration. vLLM makes one for a model within a model, or one that drafts.
        if not compile_cache.is_kept_apart(vllm_config):
            refusals.check(cls.early_rules, vllm_config, cls.where)
        # The compiler's passes that fuse into vLLM's compiled kernels: `early_rules` refuses those that users ask for.
        passes = vllm_config.compilation_config.pass_config
        for fusion in refusals.fusions(vllm_config):
            if getattr(passes, fusion) is None:
                setattr(passes, fusion, False)

    @classmethod
    def compile_and_capture_nothing(cls, vllm_config: "VllmConfig") -> None:
        """Switch torch.compile and graph capture off, unless users ask for them."""
        from vllm.config import CompilationMode, CUDAGraphMode

        compilation = vllm_config.compilation_config
        if compilation.mode is None:
            compilation.mode = CompilationMode.NONE
        if compilation.cudagraph_mode is None:
            compilation.cudagraph_mode = CUDAGraphMode.NONE

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        refusals.check(cls.rules, vllm_config, cls.where)
        overrides = selection.configure(vllm_config.additional_config)
        selection.require_device(cls.device_type)
        cls.check_additional_config(vllm_config.additional_config)
        for message in overridden.not_called(overrides, vllm_config.use_v2_model_runner):
            logger.warning_once("%s", message)
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = cls.worker
        # vLLM's own all-reduce is one of its compiled kernels.
        vllm_config.parallel_config.disable_custom_all_reduce = True
        compile_cache.keep_apart(vllm_config, cls.__qualname__)
        multimodal.schedule_whole_images(vllm_config)
        logger.info_once("%s", runners.which(vllm_config, cls.why_no_second_runner()))
        runners.remember(vllm_config)

    @classmethod
    def check_additional_config(cls, additional_config: Mapping) -> None:
        """Raise ValueError for an opset setting, in variables, files or the configuration, that is not valid."""
        switches.read(additional_config)

    @classmethod
    def validate_request(cls, processed_inputs, params) -> None:
        from vllm import SamplingParams

        if isinstance(params, SamplingParams):
            runners.check_integers(params)
            runners.check_request(params)
            runners.check_scores(params)

    # vLLM calls the next two if users ask for the feature. vLLM would then refuse it in its own words.

    def is_sleep_mode_available(self) -> bool:
        raise refusals.SLEEP.refusal(self.where)

    def is_cumem_allocator_available(self) -> bool:
        raise refusals.CUMEM_ALLOCATOR.refusal(self.where)

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    # Kernels and layers

    @classmethod
    def import_kernels(cls) -> None:
        """Import nothing, because there are no compiled kernels."""

    @classmethod
    def import_ir_kernels(cls) -> None:
        super().import_ir_kernels()
        from vllm_opset.model import ir

        ir.register()

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: "VllmConfig") -> "IrOpPriorityConfig":
        from vllm_opset.model import ir

        ir.register()
        return ir.priority()

    @classmethod
    def opaque_attention_op(cls) -> bool:
        """Call attention directly, not through a custom op: without a compiler the custom op only costs time."""
        return False

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        """vLLM's own wrapper. vLLM calls this only if `support_static_graph_mode` is true."""
        return "vllm.compilation.cuda_graph.CUDAGraphWrapper"

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads: int | None = None) -> str:
        refusals.check_attention(cls.attention_backend, selected_backend, attn_selector_config, cls.where)
        return cls.attention_backend


def _ask_about_multimodal(architectures: list[str]) -> None:
    """Ask the platform about a multimodal model: the modules of many import torchvision, which may be absent."""
    from vllm.model_executor.models.registry import _MULTIMODAL_MODELS
    from vllm.platforms import current_platform

    if isinstance(current_platform, OpsetPlatform) and _MULTIMODAL_MODELS.keys() & architectures:
        current_platform.check_multimodal()
