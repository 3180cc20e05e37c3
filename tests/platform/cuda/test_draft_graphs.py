"""Which engines get graphs of a draft model. `tests/engine/test_drafts.py` drafts with emulated ones."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from vllm_opset.attention.backend import OpsetAttentionBackend
from vllm_opset.platform import second_runner

pytestmark = [
    pytest.mark.window,
    pytest.mark.skipif(
        not second_runner.draft_by.bridge.needed(), reason="this vLLM has no draft models: runs with 0.32 and later"
    ),
]

DRAFTS = 3
SIZES = [4, 8, 16, 20, 64]  # of tokens: of 1, 2, 4, 5 and 16 requests with three drafts and one more token each


class Derived(OpsetAttentionBackend):
    """A backend that vLLM derives from opset's."""


class Graphs:
    """Stands for `DraftGraphs`."""

    def __init__(self, speculator, sizes, pool) -> None:
        self.given = speculator, list(sizes), pool

    def run_model(self) -> None:
        pass


@pytest.fixture
def worker(monkeypatch):
    """`worker(**changes)`: the attributes of a worker that are read, as after vLLM has captured its graphs."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

    monkeypatch.setattr("vllm_opset.platform.cuda.draft_graphs.DraftGraphs", Graphs)

    def worker(
        kind: type = StandaloneARSpeculator,
        backend: type = OpsetAttentionBackend,
        mode: str = "FULL_AND_PIECEWISE",
        world_size: int = 1,
        adapters: object = None,
        sleep_mode: bool = False,
        most_requests: int = 256,
        most_tokens: int = 8192,
        captured: Sequence[int] = SIZES,
        quantization: str | None = None,
        eager: bool | None = None,
    ) -> SimpleNamespace:
        speculator = kind.__new__(kind)
        speculator.attn_groups = [[SimpleNamespace(backend=OpsetAttentionBackend)], [SimpleNamespace(backend=backend)]]
        config = SimpleNamespace(
            compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode[mode], cudagraph_capture_sizes=captured),
            scheduler_config=SimpleNamespace(max_num_seqs=most_requests, max_num_batched_tokens=most_tokens),
            speculative_config=SimpleNamespace(
                num_speculative_tokens=DRAFTS,
                draft_model_config=SimpleNamespace(quantization=quantization),
                enforce_eager=eager,
            ),
            parallel_config=SimpleNamespace(world_size_across_dp=world_size),
            lora_config=adapters,
            model_config=SimpleNamespace(enable_sleep_mode=sleep_mode),
        )
        runner = SimpleNamespace(speculator=speculator, cudagraph_manager=SimpleNamespace(pool="vLLM's pool"))
        return SimpleNamespace(vllm_config=config, model_runner=runner)

    return worker


def is_captured(worker) -> bool:
    from vllm_opset.platform.cuda import draft_graphs

    draft_graphs.capture(worker)
    return "_run_model" in vars(worker.model_runner.speculator)


def sizes(worker) -> list[int]:
    assert is_captured(worker)
    speculator, found, pool = worker.model_runner.speculator._run_model.__self__.given
    assert speculator is worker.model_runner.speculator and pool == "vLLM's pool"
    return found


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "FULL"])
def test_the_requests_of_vllms_decode_graphs_are_captured(mode, worker):
    assert sizes(worker(mode=mode)) == [1, 2, 4, 5, 16]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"most_requests": 10}, [1, 2, 4, 5, 10]),
        ({"most_requests": 4}, [1, 2, 4]),
        # A request has a further token in the draft model's first run, and the model compiles no longer step.
        ({"most_tokens": 64}, [1, 2, 4, 5, 12]),
        ({"most_tokens": 5}, [1]),
        ({"captured": [1, 2, 30]}, [1, 7]),
        ({"captured": [3]}, []),
        ({"captured": []}, []),
    ],
)
def test_no_graph_is_larger_than_a_step(limits, expected, worker):
    assert sizes(worker(**limits)) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": torch.nn.Module},
        {"backend": Derived},
        {"mode": "PIECEWISE"},
        {"mode": "NONE"},
        {"world_size": 2},
        {"adapters": "two"},
        {"sleep_mode": True},
        {"quantization": "awq_marlin"},
        {"eager": True},
    ],
    ids=lambda changes: "-".join(map(str, changes)),
)
def test_nothing_is_captured_with(changes, worker):
    assert not is_captured(worker(**changes))


def test_nothing_is_captured_without_drafts():
    from vllm_opset.platform.cuda import draft_graphs

    draft_graphs.capture(SimpleNamespace(vllm_config=None, model_runner=SimpleNamespace()))
    draft_graphs.capture(SimpleNamespace(vllm_config=None, model_runner=SimpleNamespace(speculator=None)))


def test_no_graph_outlives_the_worker(worker):
    from vllm_opset.platform.cuda import draft_graphs

    one = worker()
    assert is_captured(one)
    draft_graphs.drop(one)
    assert "_run_model" not in vars(one.model_runner.speculator)
    for other in ({}, {"model_runner": None}, {"model_runner": SimpleNamespace(speculator=None)}):
        draft_graphs.drop(SimpleNamespace(**other))
