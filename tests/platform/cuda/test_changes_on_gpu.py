"""In a process that has a GPU, the plugin changes what the registry of bridges declares."""

import pytest
import torch
from changes import declared, found

from vllm_opset.platform import stock

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not stock.has_kernels_for_cuda(),
    reason="needs an NVIDIA GPU and stock vLLM: runs on one",
)


def test_the_declared_changes_are_all():
    expected = {platform: declared(platform) for platform in ("cuda", "native")}
    for changed in expected.values():
        changed["loading"].discard("torch.ops._C.weak_ref_tensor")  # stock vLLM's kernels have it
    assert found(*expected) == expected
