"""The memory of the KV cache: its layout, and blocks of it that are zeroed and copied."""

import pytest
import torch

from vllm_opset.kernels.ascend import _cache
from vllm_opset.platform.npu.attention import prepare_blocks, split_kv_cache

NUM_BLOCKS, HEADS, BLOCK_SIZE, SIZE = 6, 2, 128, 64


def packed(num_blocks: int = NUM_BLOCKS) -> torch.Tensor:
    """A cache in one piece, as vLLM hands it to a layer; all elements differ."""
    shape = num_blocks, HEADS, BLOCK_SIZE, 2 * SIZE
    return torch.arange(num_blocks * HEADS * BLOCK_SIZE * 2 * SIZE, device="npu", dtype=torch.float32).view(shape)


def test_keys_and_values_are_a_piece_of_memory_each():
    cache = packed()
    keys, values = _cache.caches(split_kv_cache(cache))
    assert keys.shape == values.shape == (NUM_BLOCKS, BLOCK_SIZE, HEADS, SIZE)
    assert keys.data_ptr() == cache.data_ptr()
    assert values.data_ptr() == cache.data_ptr() + cache.nbytes // 2
    assert keys.is_contiguous() and values.is_contiguous()


def test_a_cache_in_pieces_is_refused():
    with pytest.raises(ValueError, match="not in one piece"):
        split_kv_cache(packed().transpose(0, 1).contiguous().transpose(0, 1))


@pytest.mark.parametrize("ratio", [1, 2], ids=["one", "two of the kernels' blocks to one of vLLM's"])
def test_blocks_are_zeroed_and_then_copied_in_both_halves(ratio):
    caches = [split_kv_cache(packed(ratio * NUM_BLOCKS)) for _ in range(2)]
    before = caches[0].cpu().unflatten(0, (NUM_BLOCKS, ratio))
    shared_by_two_layers = [*caches, caches[0]]
    prepare_blocks(shared_by_two_layers, NUM_BLOCKS, [1, 4], [(0, 5), (4, 2), (5, 3)])
    for cache in caches:
        after = cache.cpu().unflatten(0, (NUM_BLOCKS, ratio))
        assert not after[[1, 4, 2]].any()
        assert torch.equal(after[[0, 5, 3]], before[[0, 0, 5]])


def test_vllm_asks_for_blocks_by_the_layout_that_can_be_divided(engine, relaxed, tmp_path):
    """Layers with and without a window share memory: a block may belong to either."""
    import asking

    asking.build("gemma2", tmp_path)
    with engine(tmp_path) as llm:
        (shapes,) = llm.collective_rpc(
            lambda worker: [
                (tuple(cache.shape), cache.data_ptr(), all(half.is_contiguous() for half in _cache.caches(cache)))
                for cache in worker.model_runner.kv_caches
            ]
        )
    assert len(shapes) == 3
    assert {shape[1:] for shape, _, _ in shapes} == {(2, BLOCK_SIZE, 2, 64)}
    assert all(contiguous for *_, contiguous in shapes)
    assert len({pointer for _, pointer, _ in shapes}) < 3, "layers of two groups share memory"
