"""Every kernel on tensors of the meta device, which have shapes but no values, to test devices other than the CPU.

On the CPU, a kernel may create a CPU tensor or read a tensor back without an error. On the meta device both are errors.
torch_npu's real Meta kernels compute the results of its operators.
"""

import emulation
import pytest
import torch
from caches import split_caches
from checks import KERNELS, by_name
from emulation import Limits
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from vllm_opset.ops.attention.paged_batch import PagedBatch

# This op reads the largest k back, by design.
READS_BACK = "top_k_top_p_sample"
OTHERS = [(op, kernel) for op, kernel in KERNELS if op.name != READS_BACK]


class OneDevice(TorchDispatchMode):
    """Asserts that no operator of torch_npu sees a CPU tensor, except lengths where it expects them there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("npu", "atb"):
            tensors = by_name(func, args, kwargs)
            lengths = tensors.pop("context_lens", None)
            assert {x.device.type for x in tree_leaves(tensors) if isinstance(x, torch.Tensor)} == {"meta"}
            assert lengths is None or lengths.device.type == "cpu"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def meta_kernels_of_atb():
    """Meta kernels for the ATB operators, which torch_npu lacks: these write in place and return nothing."""
    library = torch.library.Library("atb", "IMPL")
    for operator in ("_npu_reshape_and_cache", "_npu_rotary_embedding", "_npu_paged_attention"):
        library.impl(operator, lambda *args, **kwargs: None, "Meta")
    yield
    library._destroy()


def on_meta(values):
    return tree_map_only(PagedBatch, batch_on_meta, tree_map_only(torch.Tensor, lambda x: x.to("meta"), values))


def batch_on_meta(batch: PagedBatch) -> PagedBatch:
    """The batch on the meta device. The host has its lengths as well, so that a kernel that reads them back fails."""
    on_host = {"query_start_loc_cpu": batch.query_start_loc, "seq_lens_cpu": batch.seq_lens}
    tensors = on_meta((batch.query_start_loc, batch.seq_lens, batch.block_table))
    return PagedBatch(*tensors, batch.max_query_len, batch.max_seq_len, batch.causal, **on_host)


@pytest.mark.parametrize(("op", "kernel"), OTHERS, ids=lambda value: getattr(value, "name", value))
def test_kernel_stays_on_its_device(op, kernel, meta_kernels_of_atb):
    ran = 0
    with emulation.mode(Limits.STRICT), split_caches():
        for sample in (sample for dtype in op.dtypes for sample in op.samples("cpu", dtype)):
            args, kwargs = sample.make()
            if kernel.supports(op.problem_for(*args, **kwargs)) is None:
                with OneDevice():
                    result = kernel.call(*on_meta(args), **on_meta(kwargs))
                assert all(x.device.type == "meta" for x in tree_leaves(result) if x is not None), sample.name
                ran += 1
    assert ran, "not one sample was run"
