"""Settings that the platform for NPUs refuses, with the cure, when the configuration is made."""

import sys

import emulated_npu
import pytest
import quantised
from processes import run
from questions import MODEL

ASKED = {
    "block size": ({"block_size": 16}, "another block size of the KV cache: leave out --block-size, or give 128"),
    "graphs": (
        {"compilation_config": {"cudagraph_mode": "FULL"}},
        r"graph capture of steps other than decode steps: give .*FULL_DECODE_ONLY.*, or leave cudagraph_mode out",
    ),
    "graphs of pooling": (
        {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}, "runner": "pooling"},
        "graph capture of pooling models: leave cudagraph_mode out",
    ),
    "compiler": ({"compilation_config": {"mode": 3}}, "torch.compile: leave the mode out"),
    "several NPUs": ({"tensor_parallel_size": 2}, "tensor parallelism: .*use one NPU"),
    "fp8 cache": ({"kv_cache_dtype": "fp8"}, "another dtype than the model's: leave out --kv-cache-dtype"),
    "offloading": ({"cpu_offload_gb": 1}, "weight offloading"),
    "LoRA": ({"enable_lora": True}, "adapters"),
    "keys and values of different sizes": (
        {"hf_overrides": {"architectures": ["MiMoV2FlashForCausalLM"], "head_dim": 24, "v_head_dim": 16}},
        "keys and values of different sizes .*: choose another model",
    ),
    "fp8 weights": ({"quantization": "fp8"}, "quantised weights with the method fp8: choose .* int8 weights"),
    "fp8 weights of compressed-tensors": (
        {"hf_overrides": {"quantization_config": quantised._compressed_config(quantised.FP8, "channel")}},
        r"quantised weights with 8-bit float weights \(group_0 of compressed-tensors\): choose .* int8 weights",
    ),
}


def configuration(**arguments):
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=str(MODEL), max_model_len=512, **arguments).create_engine_config()


@pytest.mark.parametrize("name", ASKED)
def test_a_feature_is_refused(name):
    arguments, said = ASKED[name]
    with pytest.raises(Exception, match=said) as failure:
        configuration(**arguments)
    assert "vllm-opset on an NPU does not support" in str(failure.value)


CONFIGURE = """
import sys
import torch
from vllm.engine.arg_utils import EngineArgs

EngineArgs(model=sys.argv[1], max_model_len=512).create_engine_config()
assert not torch.npu.is_initialized()
"""


def test_a_configuration_leaves_the_npu_to_the_engines_process():
    """vLLM forks the engine's process. A process cannot use an NPU if the process it was forked from uses one."""
    finished = run(sys.executable, "-c", CONFIGURE, MODEL, **emulated_npu.variables())
    assert finished.code == 0, finished.output


def test_what_is_not_asked_for_is_decided():
    from vllm.config import CompilationMode, CUDAGraphMode

    config = configuration(block_size=128)
    assert config.compilation_config.mode == CompilationMode.NONE
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE
    assert config.parallel_config.worker_cls == "vllm_opset.platform.npu.worker.OpsetNpuWorker"


@pytest.mark.parametrize("runner", [None, "0", "1"])
def test_graphs_are_taken_only_where_they_are_asked_for_and_with_a_warning(runner, caplog, monkeypatch):
    from vllm.config import CUDAGraphMode

    if runner is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    config = configuration(compilation_config={"cudagraph_mode": "FULL_DECODE_ONLY"})
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY
    assert [r.getMessage() for r in caplog.records if "graphs" in r.getMessage()] == [
        "vllm-opset has never run graphs on an Ascend NPU: what follows is untested there"
    ]
    caplog.clear()
    assert configuration().compilation_config.cudagraph_mode == CUDAGraphMode.NONE
    assert not [r for r in caplog.records if "graphs" in r.getMessage()]
