"""Settings that vLLM sets for some models before it asks its platform, and that then look like a user's choice."""

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING

from vllm_opset.platform.bridges import EVERY, patch, uses, wrap_once

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ATTENTION = ("attention_config.backend", "attention_config.flash_attn_version")
CAPTURED_SIZES = ("compilation_config.max_cudagraph_capture_size",)
CONFIGS = "vllm.model_executor.models.config"

# By their paths, the settings that were taken back from the configuration that vLLM is completing.
_taken_back: dict[str, object] = {}


def _sets_them() -> bool:
    sizes = uses(f"{CONFIGS}.GptOssForCausalLMConfig.verify_and_update_config", "max_cudagraph_capture_size")
    return sizes() or uses(f"{CONFIGS}.Gemma4Config.verify_and_update_config", "flash_attn_version")()


@patch(
    _sets_them,
    ends="vLLM leaves the attention of Gemma-4 and the captured sizes of gpt-oss to its platform",
    changes=("vllm.config.vllm.VllmConfig.try_verify_and_update_config",),
    loading=EVERY,
)
def take_back() -> None:
    """Let the platform choose the attention backend and the captured steps of every model, unless a user did.

    Before vLLM asks its platform, it sets a backend or a version of FlashAttention for some models, such as Gemma-4,
    whose layers differ in head size, and the longest captured step of gpt-oss. These look like a user's choice.
    Platforms with one backend would refuse Gemma-4, and a CPU, which captures nothing, would refuse gpt-oss. On stock
    vLLM, what vLLM set stays where opset's attention is off.
    """
    from vllm.config import VllmConfig

    def around(verify: Callable) -> Callable:
        def restored(config: "VllmConfig") -> None:
            global _taken_back
            users = _read(config)
            verify(config)
            _taken_back = {path: value for path, value in _read(config).items() if value != users[path]}
            _write(config, users)

        return restored

    wrap_once(VllmConfig, "try_verify_and_update_config", around)


def leave_to_vllm(config: "VllmConfig", paths: tuple[str, ...]) -> None:
    """Set again what vLLM had set at these paths. config: the one that vLLM is completing."""
    _write(config, {path: value for path, value in _taken_back.items() if path in paths})


def _read(config: "VllmConfig") -> dict[str, object]:
    return {path: attrgetter(path)(config) for path in (*ATTENTION, *CAPTURED_SIZES)}


def _write(config: "VllmConfig", settings: dict[str, object]) -> None:
    for path, value in settings.items():
        part, _, name = path.partition(".")
        setattr(getattr(config, part), name, value)
