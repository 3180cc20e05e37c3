"""In vLLM's first model runner, the allowed tokens of a request stay its own while requests change their rows."""

import inspect

import pytest
import torch

from vllm_opset.platform.v1 import input_batch

pytestmark = pytest.mark.window

VOCABULARY = 16
# `allowed_token_ids` of the requests of these names. The others may draw any token.
ALLOWED = {"a": [1, 2], "b": [3]}
ANY = list(range(VOCABULARY))


@pytest.fixture
def batch():
    from vllm.v1.worker import gpu_input_batch

    sizes = {"max_num_reqs": 4, "max_model_len": 8, "max_num_batched_tokens": 8, "vocab_size": VOCABULARY}
    groups = {"block_sizes": [8], "kernel_block_sizes": [8], "max_num_blocks_per_req": [1]}
    known = inspect.signature(gpu_input_batch.InputBatch).parameters  # 0.32 drops one
    with pytest.MonkeyPatch.context() as patch:
        for method in ("swap_states", "condense"):  # so that they are vLLM's again afterwards
            patch.setattr(gpu_input_batch.InputBatch, method, getattr(gpu_input_batch.InputBatch, method))
        input_batch.keep_allowed_tokens_apart()
        given = {name: value for name, value in (sizes | groups).items() if name in known}
        yield gpu_input_batch.InputBatch(device=torch.device("cpu"), **given)


def add(batch, *names: str) -> None:
    from vllm import SamplingParams
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    for name in names:
        request = {"req_id": name, "prompt_token_ids": [5], "mm_features": [], "generator": None, "block_ids": ([0],)}
        parameters = SamplingParams(allowed_token_ids=ALLOWED.get(name))
        counts = {"num_computed_tokens": 0, "output_token_ids": []}
        batch.add_request(CachedRequestState(**request, **counts, sampling_params=parameters))
    batch.refresh_metadata()


def remove(batch, *names: str) -> None:
    for name in names:
        batch.remove_request(name)
    batch.condense()
    batch.refresh_metadata()


def allowed(batch) -> dict[str, list[int]]:
    """The tokens that each request may draw, as the sampler sees them."""
    mask = batch.sampling_metadata.allowed_token_ids_mask
    rows = [[]] * batch.num_reqs if mask is None else [row.nonzero().flatten().tolist() for row in mask]
    return {name: [token for token in ANY if token not in row] for name, row in zip(batch.req_ids, rows, strict=True)}


def test_swapped_requests_keep_their_allowed_tokens(batch):
    add(batch, "a", "x", "b")
    batch.swap_states(0, 1)
    batch.swap_states(0, 2)
    add(batch, "y")
    assert allowed(batch) == {"b": [3], "a": [1, 2], "x": ANY, "y": ANY}


def test_a_moved_request_leaves_no_allowed_tokens_behind(batch):
    add(batch, "x", "y", "a", "b")
    remove(batch, "x", "y")
    assert allowed(batch) == ALLOWED
    add(batch, "z", "w")
    assert allowed(batch) == {"a": [1, 2], "b": [3], "z": ANY, "w": ANY}


def test_requests_that_end_leave_no_allowed_tokens_behind(batch):
    add(batch, "a", "x", "b")
    remove(batch, "a", "x", "b")
    add(batch, "y", "z")
    assert allowed(batch) == {"y": ANY, "z": ANY}
