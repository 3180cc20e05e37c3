"""Steps that a full graph replays build no attention metadata, if only layers in the graph would read it."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from vllm_opset.platform import second_runner

pytestmark = [
    pytest.mark.window,
    pytest.mark.skipif(
        not second_runner.skip_metadata.bridge.needed(),
        reason="opset captures nothing more up to vLLM 0.30: ends when 0.31 is the oldest supported release",
    ),
]


@pytest.fixture
def worker(monkeypatch):
    """`worker(*builders, **changes)`: the attributes of a worker that are read. builders: of its metadata."""
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    from vllm_opset.attention.metadata import OpsetMetadataBuilder

    monkeypatch.setattr(DefaultModelState, "prepare_attn", lambda self, *args, **kwargs: (args, kwargs))

    def worker(*builders: type, state: type = DefaultModelState, **changes) -> SimpleNamespace:
        made = [builder.__new__(builder) for builder in builders or (OpsetMetadataBuilder,)]
        groups = [[SimpleNamespace(metadata_builders=[one])] for one in made]
        runner = SimpleNamespace(model_state=state.__new__(state), attn_groups=groups)
        fields = {"use_v2_model_runner": True, "kv_transfer_config": None, "speculative_config": None}
        return SimpleNamespace(vllm_config=SimpleNamespace(**fields | changes), model_runner=runner)

    return worker


def built(worker, mode: str, **arguments) -> object:
    """What vLLM gets for a step that runs in this mode."""
    from vllm.config import CUDAGraphMode

    given = ("batch", CUDAGraphMode[mode], "block tables", "slots", "groups", "cache")
    return worker.model_runner.model_state.prepare_attn(*given, **arguments)


def test_a_replayed_step_has_none_and_others_have_all(worker):
    from vllm.config import CUDAGraphMode

    from vllm_opset.platform.cuda import replays

    one = worker()
    replays.build_no_metadata(one)
    assert built(one, "FULL") == {}
    for mode in ("PIECEWISE", "NONE"):
        given = ("batch", CUDAGraphMode[mode], "block tables", "slots", "groups", "cache")
        assert built(one, mode) == (given, {"for_capture": False})
    assert built(one, "FULL", for_capture=True)[1] == {"for_capture": True}


@pytest.mark.parametrize(
    "changes",
    [{"use_v2_model_runner": False}, {"kv_transfer_config": "a connector"}, {"speculative_config": "drafts"}],
    ids=lambda changes: next(iter(changes)),
)
def test_metadata_is_built_with(changes, worker):
    from vllm_opset.platform.cuda import replays

    one = worker(**changes)
    replays.build_no_metadata(one)
    assert built(one, "FULL") != {}


def test_metadata_is_built_for_other_builders_and_states(worker):
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    from vllm_opset.attention.metadata import OpsetMetadataBuilder
    from vllm_opset.platform.cuda import replays

    class Derived(OpsetMetadataBuilder):
        """Stands for a builder that vLLM derives, for example for chunked local attention."""

    class State(DefaultModelState):
        """Stands for the state of a hybrid model."""

    class Planning:
        """Stands for a builder of vLLM's own backends."""

    others = [worker(OpsetMetadataBuilder, Derived), worker(Planning), worker(state=State)]
    without = worker()
    without.model_runner.attn_groups = [[]]
    for one in (*others, without):
        replays.build_no_metadata(one)
        assert built(one, "FULL") != {}


def test_vllm_passes_the_mode_second_and_says_whether_it_captures():
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    names = list(inspect.signature(DefaultModelState.prepare_attn).parameters)
    assert names[:3] == ["self", "input_batch", "cudagraph_mode"] and "for_capture" in names


def test_opsets_metadata_is_views_of_vllms_buffers():
    """A builder that copied or wrote anything would have to run before each replay."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from vllm_opset.attention.metadata import OpsetMetadataBuilder

    builder = OpsetMetadataBuilder.__new__(OpsetMetadataBuilder)
    builder.encoder_only, builder.lengths_on_host = False, True
    starts, lens = torch.arange(3, dtype=torch.int32), torch.tensor([9, 5], dtype=torch.int32)
    table, slots = torch.zeros(2, 4, dtype=torch.int32), torch.arange(2)
    before = [tensor.clone() for tensor in (starts, lens, table, slots)]
    common = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lens, num_reqs=2, num_actual_tokens=2,
        max_query_len=1, max_seq_len=9, block_table_tensor=table, slot_mapping=slots, seq_lens_cpu_upper_bound=lens,
    )  # fmt: skip
    made, state = builder.build(0, common), dict(vars(builder))
    of_device = (made.batch.query_start_loc, made.batch.seq_lens, made.batch.block_table, made.slot_mapping)
    assert [one.data_ptr() for one in of_device] == [one.data_ptr() for one in (starts, lens, table, slots)]
    assert all(torch.equal(*pair) for pair in zip(of_device, before, strict=True)) and vars(builder) == state
