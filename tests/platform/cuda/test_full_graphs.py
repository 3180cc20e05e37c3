"""Full graphs of prompts and mixed steps: vLLM's own lists of graphs are changed, without a GPU."""

import functools
import importlib.util
from types import SimpleNamespace

import pytest
import torch

from vllm_opset.platform import second_runner

pytestmark = [
    pytest.mark.window,
    pytest.mark.skipif(
        not second_runner.capture_full_for_piecewise.bridge.needed(),
        reason="this vLLM prepares no graph for one request that has all tokens: runs with 0.31 and later",
    ),
]
needs_triton = pytest.mark.skipif(
    torch.cuda.is_available() or not importlib.util.find_spec("triton"),
    reason="asks for a Hopper GPU that is not there: runs where there is Triton, and no GPU",
)

SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
MOST_REQUESTS = 32
NUM_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 64, 16


@pytest.fixture
def manager(monkeypatch):
    """`manager(mode)`: vLLM's list of graphs for engines of up to 32 requests, as after it has captured them."""
    from vllm.config import CUDAGraphMode, VllmConfig
    from vllm.v1.worker.gpu import cudagraph_utils

    alone = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: alone)
    monkeypatch.setattr(cudagraph_utils, "current_platform", SimpleNamespace(get_global_graph_pool=lambda: None))

    def manager(mode: str):
        config = VllmConfig()
        config.scheduler_config.max_num_seqs = MOST_REQUESTS
        config.compilation_config.cudagraph_capture_sizes = SIZES
        config.compilation_config.max_cudagraph_capture_size = SIZES[-1]
        graphs = cudagraph_utils.ModelCudaGraphManager(config, torch.device("cpu"), CUDAGraphMode[mode], 1)
        graphs._graphs_captured = True
        return graphs

    return manager


def found(graphs, num_reqs: int, num_tokens: int, each: int | None = None) -> tuple:
    """The graph of a step. each: the tokens of each request, if all have as many and decode."""
    graph = graphs.dispatch(num_reqs, num_tokens, each, 0)
    return graph.cg_mode.name, graph.num_tokens, graph.num_reqs, graph.uniform_token_count


def test_decode_keeps_its_graphs_and_all_else_finds_whole_ones(manager):
    graphs = manager("FULL_AND_PIECEWISE")
    decode = [found(graphs, number, number, each=1) for number in (1, 3, 32)]
    assert found(graphs, 3, 100) == ("PIECEWISE", 128, None, None)
    second_runner.capture_full_for_piecewise(graphs)
    assert [found(graphs, number, number, each=1) for number in (1, 3, 32)] == decode
    assert decode[1] == ("FULL", 4, 4, 1)
    assert found(graphs, 3, 100) == ("FULL", 128, 32, None)
    assert found(graphs, 1, 7) == ("FULL", 8, 8, None)
    assert found(graphs, 2, 256) == ("FULL", 256, 32, None)
    assert found(graphs, 2, 257)[0] == "NONE"


def test_each_graph_is_captured_once_and_larger_ones_first(manager):
    from vllm.config import CUDAGraphMode

    graphs = manager("FULL_AND_PIECEWISE")
    second_runner.capture_full_for_piecewise(graphs)
    assert list(graphs._capture_descs) == [CUDAGraphMode.FULL]
    captured = graphs._capture_descs[CUDAGraphMode.FULL]
    sizes = [graph.num_tokens for graph in captured]
    assert len(set(captured)) == len(captured) and sizes == sorted(sizes, reverse=True)
    assert sorted(size for size in sizes) == sorted([*SIZES, *(size for size in SIZES if size <= MOST_REQUESTS)])
    assert {graph for candidates in graphs._candidates.values() for graph in candidates} == set(captured)


def test_vllm_prepares_a_full_graph_for_one_request_with_all_tokens(monkeypatch):
    from vllm.v1.worker.gpu import cudagraph_utils

    class Asked(Exception):
        pass

    def make_dummy(num_reqs, num_tokens, buffers, max_query_len=None):
        raise Asked(num_reqs, num_tokens, max_query_len)

    monkeypatch.setattr(cudagraph_utils.InputBatch, "make_dummy", make_dummy)
    nothing = dict.fromkeys(("model_state", "input_buffers", "block_tables", "attn_groups", "kv_cache_config"))
    with pytest.raises(Asked) as asked:
        cudagraph_utils.prepare_inputs_to_capture(32, 128, **nothing, full_cudagraph=True)
    assert asked.value.args == (32, 128, 128)


def layer(backend: type | None = None, **changes) -> SimpleNamespace:
    """A layer of opset's attention, whose kernel is Triton's. changes: to its implementation."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    from vllm_opset.attention.backend import OpsetAttentionBackend
    from vllm_opset.attention.impl import OpsetAttentionImpl
    from vllm_opset.kernels.triton.paged_attention import VARIANTS, paged_attention

    class Layer(AttentionLayerBase):
        impl = OpsetAttentionImpl(NUM_HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, NUM_HEADS)

        def get_attn_backend(self) -> type:
            return backend or OpsetAttentionBackend

        def get_kv_cache_spec(self, vllm_config) -> None:
            return None

    arguments = {"scale": HEAD_SIZE**-0.5, "alibi_slopes": changes.pop("alibi_slopes", None)}
    vars(Layer.impl).update({"dtype": torch.bfloat16, "variants": VARIANTS} | changes)
    Layer.impl._attend = functools.partial(paged_attention, **arguments)
    Layer.kv_cache = torch.zeros(4, NUM_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE, dtype=Layer.impl.dtype)
    return Layer()


def worker(graphs, *layers: SimpleNamespace, **changes) -> SimpleNamespace:
    """The attributes of a worker that are read. changes: to its configuration, by path."""
    config = SimpleNamespace(
        kv_transfer_config=None,
        speculative_config=None,
        lora_config=None,
        model_config=SimpleNamespace(is_multimodal_model=False),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
        parallel_config=SimpleNamespace(data_parallel_size=1),
        compilation_config=SimpleNamespace(static_forward_context=dict(enumerate(layers))),
    )
    for path, value in changes.items():
        *folder, name = path.split("__")
        setattr(functools.reduce(getattr, folder, config), name, value)
    return SimpleNamespace(vllm_config=config, model_runner=SimpleNamespace(cudagraph_manager=graphs))


@pytest.fixture
def mode_of_prompts(manager, monkeypatch):
    """`mode_of_prompts(*layers, **changes)`: how a prompt is replayed by an engine on a Hopper GPU."""
    from vllm_opset.kernels.triton.paged_attention import prefill_sm90
    from vllm_opset.platform.cuda import full_graphs

    monkeypatch.setattr(prefill_sm90, "available", lambda device: True)

    def mode_of_prompts(*layers, mode: str = "FULL_AND_PIECEWISE", **changes) -> str:
        graphs = manager(mode)
        full_graphs.replace_piecewise(worker(graphs, *layers, **changes))
        return found(graphs, 1, 100)[0]

    return mode_of_prompts


@needs_triton
def test_prompts_are_captured_whole(mode_of_prompts):
    assert mode_of_prompts(layer(), layer()) == "FULL"


@needs_triton
@pytest.mark.parametrize(
    "changes",
    [
        {"kv_transfer_config": "a connector"},
        {"speculative_config": "drafts"},
        {"lora_config": "adapters"},
        {"model_config__is_multimodal_model": True},
        {"cache_config__kv_sharing_fast_prefill": True},
        {"parallel_config__data_parallel_size": 2},
        {"mode": "PIECEWISE"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_prompts_keep_their_pieces_with(changes, mode_of_prompts):
    assert mode_of_prompts(layer(), **changes) == "PIECEWISE"


@needs_triton
@pytest.mark.parametrize(("mode", "expected"), [("FULL_DECODE_ONLY", "NONE"), ("FULL", "FULL"), ("NONE", "NONE")])
def test_a_users_other_modes_stay(mode, expected, mode_of_prompts):
    assert mode_of_prompts(layer(), mode=mode) == expected


@needs_triton
def test_one_layer_of_another_kind_keeps_the_pieces(mode_of_prompts):
    from vllm.v1.attention.backend import AttentionBackend

    from vllm_opset.attention.backend import OpsetAttentionBackend

    class Derived(OpsetAttentionBackend):
        """Stands for a backend that vLLM derives, for example for chunked local attention."""

    others = {
        "vLLM's": layer(AttentionBackend),
        "derived": layer(Derived),
        "no variants": layer(variants=None),
        "fp32": layer(dtype=torch.float32),
        "ALiBi": layer(alibi_slopes=torch.ones(NUM_HEADS)),
    }
    found = {name: mode_of_prompts(layer(), other) for name, other in others.items()}
    assert found == dict.fromkeys(others, "PIECEWISE")


@needs_triton
def test_layers_of_experts_do_not_matter(mode_of_prompts):
    assert mode_of_prompts(layer(), torch.nn.Linear(1, 1)) == "FULL"
