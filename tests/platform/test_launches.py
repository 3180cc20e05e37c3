"""How launches of vLLM's kernels become calls, on every release: no kernel of vLLM's runs here."""

import inspect

import launches
import numpy as np
import pytest
import torch

from vllm_opset.platform.cpu.runner_kernels import REGISTRY
from vllm_opset.platform.refusals import Refusal

pytestmark = pytest.mark.window
IMPLEMENTATIONS = REGISTRY.implementations

MIN_P = ("logits_ptr", "logits_stride", "expanded_idx_mapping_ptr", "min_p_ptr", "vocab_size", "BLOCK_SIZE")


@pytest.fixture
def min_p():
    """The implementation of a small kernel."""
    return next(known for known in IMPLEMENTATIONS if known.kernel.endswith("._min_p_kernel"))


def test_a_launch_passes_what_the_implementation_takes(min_p):
    logits = torch.tensor([[0.0, 5.0, 4.0], [0.0, 5.0, 4.0]])
    min_p.launcher(MIN_P)(logits, 3, torch.tensor([1, 0]), torch.tensor([0.5, 0.0]), 3, BLOCK_SIZE=4, num_warps=1)
    assert logits.isinf().tolist() == [[False, False, False], [True, False, True]]


def test_a_kernel_with_other_parameters_is_refused(min_p):
    min_p.launcher(MIN_P)
    with pytest.raises(Refusal, match=r"\(sharpness\): set VLLM_USE_V2_MODEL_RUNNER=0"):
        min_p.launcher((*MIN_P, "sharpness_ptr"))
    with pytest.raises(Refusal, match=r"\(min_p\)"):
        min_p.launcher(tuple(name for name in MIN_P if name != "min_p_ptr"))


COMPILED = [known for known in IMPLEMENTATIONS if known.compiled]


@pytest.mark.parametrize("compiled", COMPILED, ids=lambda known: known.kernel)
def test_a_kernel_in_cpp_writes_what_its_namesake_in_numpy_writes(compiled):
    (plain,) = (known for known in IMPLEMENTATIONS if known.kernel == compiled.kernel and not known.compiled)
    names = tuple(inspect.signature(plain.run).parameters)
    assert names == tuple(inspect.signature(compiled.run).parameters)
    ours, theirs = (
        [launch.run({launch.grid: known.launcher(names)}, names) for launch in launches.launches(known.kernel)]
        for known in (compiled, plain)
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.skipif(not COMPILED, reason="needs a C++ compiler: runs where there is one")
def test_a_kernel_in_cpp_refuses_tensors_of_another_type():
    from vllm_opset.platform.cpu.runner_kernels import compiled

    ints = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"expects torch\.int64, not torch\.int32"):
        compiled.prepare_pos_seq_lens(ints, ints, ints, ints, ints)


def test_seeded_requests_draw_with_the_keys_of_the_first_runner():
    from vllm_opset.platform.cpu import sampler
    from vllm_opset.platform.v1 import sampler as first

    for seed in (5, 0, -9, 2**63 - 1):
        generator = first.SeededGenerator(seed)
        expected = [first.draw_keys(1, {0: generator}, torch.device("cpu")).item() for _ in range(70)]
        assert sampler.draw_keys(np.array([seed] * 70), np.arange(70)).tolist() == expected
