"""The two operators that write keys and values into paged caches [num_blocks, block_size, num_kv_heads, head_size]."""

import torch

from emulation.registry import documented, emulates, refuse, require


@emulates("npu::npu_scatter_pa_kv_cache")
def npu_scatter_pa_kv_cache(
    key, value, key_cache, value_cache, slot_mapping, *,
    compress_lens=None, compress_seq_offsets=None, seq_lens=None, cache_mode="PA_NZ",
):  # fmt: skip
    if cache_mode != "Norm" or not (compress_lens is compress_seq_offsets is seq_lens is None):
        raise NotImplementedError("only cache_mode='Norm' is emulated, without compression")
    require(slot_mapping.dtype in documented.SCATTER_SLOT_DTYPES, "slot_mapping is int32 or int64")
    refuse(documented.scatter_slots(slot_mapping, key_cache.shape[0] * key_cache.shape[1]))
    check(key, value, key_cache, value_cache, slot_mapping)
    write(key, value, key_cache, value_cache, slot_mapping.long())


@emulates("atb::_npu_reshape_and_cache")
def _npu_reshape_and_cache(key, value, key_cache, value_cache, slot_indices):
    """Skips negative slots, as in the ATB library's own test."""
    refuse(documented.atb_slots(slot_indices))
    check(key, value, key_cache, value_cache, slot_indices)
    used = slot_indices >= 0
    write(key[used], value[used], key_cache, value_cache, slot_indices[used].long())


def check(key, value, key_cache, value_cache, slots) -> None:
    refuse(documented.contiguous(key=key, value=value, key_cache=key_cache, value_cache=value_cache, slots=slots))
    same = key.dtype == value.dtype == key_cache.dtype == value_cache.dtype
    require(same, "key, value and the caches have one dtype")
    require(slots.shape == key.shape[:1] == value.shape[:1], "one slot for each token")
    require(key.shape[1:] == key_cache.shape[2:], "key fits key_cache [num_blocks, block_size, heads, size]")
    require(value.shape[1:] == value_cache.shape[2:], "value fits value_cache [num_blocks, block_size, heads, size]")
    used = slots[slots >= 0]
    require(bool((used < key_cache.shape[0] * key_cache.shape[1]).all()), "slots lie in the cache")
    require(len(used.unique()) == len(used), "no two tokens have one slot")


def write(key, value, key_cache, value_cache, slots: torch.Tensor) -> None:
    key_cache.flatten(0, 1)[slots] = key
    value_cache.flatten(0, 1)[slots] = value
