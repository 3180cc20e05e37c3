"""The graphs that are captured: configurations of the two platforms for GPUs, made without a GPU."""

import functools
import os
from types import SimpleNamespace

import pytest
from small_models import LLAMA, QWEN3

from vllm_opset.platform.cuda import graphs
from vllm_opset.platform.refusals import Refusal

pytestmark = pytest.mark.window

WIDE = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}


@pytest.fixture
def configured(configure, on_a_gpu, monkeypatch):
    """`configured(**arguments)`: the modes of compiler and graphs, and whether vLLM's variable enables pieces."""
    from vllm.config import VllmConfig

    from vllm_opset.platform.cuda.platform import OpsetCudaPlatform

    if hasattr(VllmConfig, "_maybe_enable_breakable_cudagraph"):
        monkeypatch.setattr(
            VllmConfig, "_maybe_enable_breakable_cudagraph", VllmConfig._maybe_enable_breakable_cudagraph
        )
    on_a_gpu(OpsetCudaPlatform)

    def configured(**arguments) -> tuple[str, str, bool]:
        compilation = configure(LLAMA, dtype="bfloat16", **arguments).compilation_config
        return compilation.mode.name, compilation.cudagraph_mode.name, os.environ.get(graphs.VARIABLE) == "1"

    return configured


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, ("NONE", "FULL_AND_PIECEWISE", True)),
        ({"speculative_config": DRAFTS}, ("NONE", "FULL_AND_PIECEWISE", True)),
        ({"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, ("NONE", "PIECEWISE", True)),
        ({"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}, ("NONE", "FULL_DECODE_ONLY", False)),
        ({"compilation_config": {"mode": 3}}, ("VLLM_COMPILE", "FULL_AND_PIECEWISE", False)),
        ({"enforce_eager": True}, ("NONE", "NONE", False)),
        ({"optimization_level": 0}, ("NONE", "NONE", False)),
        ({"offload_group_size": 2}, ("NONE", "FULL_DECODE_ONLY", False)),
        ({"runner": "pooling"}, ("NONE", "NONE", False)),
        # Without a compiler, vLLM decides for models that cannot break: NONE in 0.26, and no pieces from 0.30 on.
        ({"runner": "pooling", "compilation_config": {"cudagraph_mode": "PIECEWISE"}}, ("NONE", "NONE", False)),
        ({"offload_group_size": 2, "compilation_config": {"cudagraph_mode": "PIECEWISE"}}, ("NONE", "NONE", False)),
    ],
)
def test_modes(arguments, expected, configured):
    assert configured(**arguments) == expected


BEYOND = [640, 768, 896, 1024, 1152, 1280, 1408, 1536, 1664, 1792, 1920, 2048]


@pytest.mark.parametrize(
    ("arguments", "largest", "beyond"),
    [
        ({}, 512, BEYOND),
        ({"max_num_seqs": 20}, 40, [128, 256, 384, 512, *BEYOND]),
        ({"max_num_seqs": 64}, 128, [256, 384, 512, *BEYOND]),
        # No step is longer than this.
        ({"max_num_batched_tokens": 1000}, 512, [640, 768, 896, 1000]),
        ({"max_num_batched_tokens": 300}, 300, []),
        ({"max_num_seqs": 2, "max_model_len": 256}, 4, [128, 256, 384, 512]),
        ({"compilation_config": {"mode": 3}}, 512, BEYOND),
        # Sizes that users set, and configurations without pieces.
        ({"compilation_config": {"max_cudagraph_capture_size": 256}}, 256, []),
        ({"compilation_config": {"cudagraph_capture_sizes": [1, 8, 24]}}, 24, []),
        ({"compilation_config": {"mode": 3, "compile_sizes": [1, 1000]}}, 512, []),
        ({"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}, 512, []),
        ({"enforce_eager": True}, 0, []),
    ],
)
def test_sizes(arguments, largest, beyond, configured, configure):
    arguments = {"max_num_seqs": 256, "max_num_batched_tokens": 8192} | arguments
    compilation = configure(LLAMA | WIDE, dtype="bfloat16", **arguments).compilation_config
    sizes = compilation.cudagraph_capture_sizes
    assert [size for size in sizes if size > largest] == beyond
    assert max(sizes, default=0) == compilation.max_cudagraph_capture_size
    assert not sizes or (beyond or [largest])[-1] == sizes[-1]


@pytest.mark.parametrize(
    ("hidden_size", "beyond"),
    [
        (3072, []),
        (2560, [2304, 2560]),
        (2048, [*range(2304, 4097, 256)]),
        (1024, [*range(2304, 4097, 256), *range(4608, 8193, 512)]),
    ],
)
def test_smaller_models_have_longer_steps_captured(hidden_size, beyond, configured, configure):
    shape = LLAMA | WIDE | {"hidden_size": hidden_size}
    compilation = configure(shape, dtype="bfloat16", max_num_batched_tokens=16384).compilation_config
    assert [size for size in compilation.cudagraph_capture_sizes if size > 512] == [*BEYOND, *beyond]


@pytest.mark.parametrize(
    ("hidden_size", "beyond"),
    [
        (5120, [2304, 2560]),
        (4096, [*range(2304, 4097, 256)]),
        (2048, [*range(2304, 4097, 256), *range(4608, 8193, 512)]),
    ],
)
def test_models_in_fp8_have_longer_steps_captured(hidden_size, beyond, configured, configure):
    shape = LLAMA | WIDE | {"hidden_size": hidden_size}
    arguments = {"dtype": "bfloat16", "quantization": "fp8", "max_num_batched_tokens": 16384}
    sizes = configure(shape, **arguments).compilation_config.cudagraph_capture_sizes
    assert [size for size in sizes if size > 512] == [*BEYOND, *beyond]


@pytest.mark.parametrize(("enable_sp", "largest"), [(True, 64), (False, 2048)])
def test_sizes_of_sequence_parallelism_stay(enable_sp, largest, configured, configure):
    """Without its setting, as from 0.33 on, vLLM has no such sizes."""
    config = configure(LLAMA | WIDE, max_num_batched_tokens=8192)
    compilation = config.compilation_config
    object.__setattr__(compilation.pass_config, "enable_sp", enable_sp)
    compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = [64], 64
    graphs.capture_longer_steps(config)
    assert compilation.max_cudagraph_capture_size == compilation.cudagraph_capture_sizes[-1] == largest


@pytest.mark.parametrize(
    ("arguments", "largest"),
    [
        ({}, 2048),
        ({"compilation_config": {"max_cudagraph_capture_size": 256}}, 256),
        ({"enforce_eager": True}, 0),
        ({"additional_config": {"opset": {"native": {"linear": "off"}}}}, 2048),
        # vLLM's sizes stay unless attention is on.
        ({"attention_backend": "FLASH_ATTN"}, 512),
        # This configuration has no pieces.
        ({"additional_config": {"opset": {"native": {"ops": "on"}}}}, 512),
    ],
)
def test_sizes_on_stock_vllm(arguments, largest, configure, native, on_a_gpu):
    on_a_gpu(native)
    arguments = {"max_num_seqs": 256, "max_num_batched_tokens": 8192} | arguments
    compilation = configure(QWEN3 | WIDE, dtype="bfloat16", **arguments).compilation_config
    sizes = compilation.cudagraph_capture_sizes
    assert max(sizes, default=0) == compilation.max_cudagraph_capture_size == largest
    assert [size for size in sizes if size > 512] == (BEYOND if largest > 512 else [])


def test_the_variable_is_taken_back_before_the_next_engine(configured):
    compiled = {"compilation_config": {"mode": 3}}
    assert [configured(**arguments)[0] for arguments in ({}, compiled, {})] == ["NONE", "VLLM_COMPILE", "NONE"]


def test_an_engine_that_is_up_changes_nothing_for_the_next(configured):
    """vLLM caches the environment as long as an engine is up."""
    from vllm import envs

    modes = []
    try:
        for arguments in ({"enforce_eager": True}, {}, {"compilation_config": {"mode": 3}}, {}):
            modes.append(configured(**arguments)[:2])
            envs.enable_envs_cache()
    finally:
        envs.disable_envs_cache()
    pieces = "NONE", "FULL_AND_PIECEWISE"
    assert modes == [("NONE", "NONE"), pieces, ("VLLM_COMPILE", "FULL_AND_PIECEWISE"), pieces]


def test_an_engine_does_not_start_with_the_variable_of_another(configured, configure):
    pieces = configure(LLAMA)
    graphs.check(pieces)
    compiled = configure(LLAMA, compilation_config={"mode": 3})
    graphs.check(compiled)
    with pytest.raises(Refusal, match=graphs.VARIABLE):
        graphs.check(pieces)
    configure(LLAMA)
    with pytest.raises(Refusal, match=graphs.VARIABLE):
        graphs.check(compiled)


def test_a_configuration_without_a_model_asks_for_nothing(configured):
    from vllm.config import CompilationConfig, VllmConfig

    VllmConfig()
    assert graphs.VARIABLE not in os.environ
    compiled = VllmConfig(compilation_config=CompilationConfig(mode=3))
    assert compiled.compilation_config.cudagraph_capture_sizes == []


@pytest.mark.parametrize(
    ("value", "expected"), [("0", "FULL_DECODE_ONLY"), ("false", "FULL_DECODE_ONLY"), ("1", "FULL_AND_PIECEWISE")]
)
def test_a_users_word_stays(value, expected, configured, monkeypatch):
    monkeypatch.setenv(graphs.VARIABLE, value)
    assert configured()[1] == configured()[1] == expected
    assert os.environ[graphs.VARIABLE] == value


def test_graphs_break_at_attention_once(monkeypatch):
    from vllm.compilation import breakable_cudagraph
    from vllm.model_executor.layers.attention import attention

    from vllm_opset.platform import compat

    if not compat.break_graphs_at_attention.bridge.needed():
        pytest.skip(
            "vLLM 0.33 breaks graphs by itself: ends, with the patch, when 0.33 is the oldest supported release"
        )

    @functools.wraps(attention.unified_attention_with_output)
    def unbroken(*args):
        return args

    monkeypatch.setenv(graphs.VARIABLE, "1")
    monkeypatch.setattr(attention, "unified_attention_with_output", unbroken)
    compat.break_graphs_at_attention()
    broken = attention.unified_attention_with_output
    assert broken is not unbroken and broken.__wrapped__ is unbroken

    added = []
    capture = SimpleNamespace(_capturing=True, add_eager=added.append)
    monkeypatch.setattr(breakable_cudagraph.BreakableCUDAGraphCapture._tls, "active", capture, raising=False)
    broken(1)
    assert len(added) == 1 and added[0]() == (1,)

    compat.break_graphs_at_attention()
    assert attention.unified_attention_with_output is broken
