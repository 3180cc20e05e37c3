"""Every kernel that runs on this machine's CPU against its contract, and the parity harness against broken kernels.

The first test is generated, so a new kernel file is tested at once. The other tests show that each kind of fault is
caught.
"""

import re

import pytest
import torch

from vllm_opset import ops, parity
from vllm_opset.kernel import REFERENCE, Kernel, kernels_of
from vllm_opset.ops.contract import Op

DEVICE = "cpu"
KERNELS = [(op, kernel) for op in ops.ALL for kernel in kernels_of(op.name).values() if kernel.runs_on(DEVICE)]


@pytest.mark.parametrize(("op", "kernel"), KERNELS, ids=lambda value: getattr(value, "name", value))
def test_kernel_keeps_its_contract(op, kernel):
    checks = list(parity.check_kernel(op, kernel, DEVICE))
    assert any(check.skipped is None for check in checks), "not one sample was run"
    failures = [f"{check.dtype} {check.case}: {check.failure}" for check in checks if check.failure]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("op", [ops.rms_norm, ops.paged_attention, ops.reshape_and_cache], ids=lambda op: op.name)
def test_what_comes_from_another_device_is_checked_on_the_cpu(op, monkeypatch):
    """The CPU stands in for another device: copying results to the CPU must not change any verdict."""
    kernel = kernels_of(op.name)["cpu"]
    here = [parity.check_sample(op, kernel, sample, torch.float32) for sample in op.samples(DEVICE, torch.float32)]
    monkeypatch.setattr(parity, "CHECKED_ON", ())
    there = [parity.check_sample(op, kernel, sample, torch.float32) for sample in op.samples(DEVICE, torch.float32)]
    assert here == there


def wrong_factor(x, *rest, **options):
    return ops.rms_norm(x, *rest, **options) * 1.02


def slightly_wrong_factor(x, *rest, **options):
    return (ops.rms_norm(x.float(), *rest, **options) * 1.001).to(x.dtype)


def adds_noise_to_small_values(x, *rest, **options):
    return ops.rms_norm(x, *rest, **options) + 1e-3


def mean_instead_of_mean_square(x, weight, epsilon, weight_offset=0.0):
    return ops.layer_norm(x, None if weight is None else weight + weight_offset, None, epsilon)


def ignores_the_offset(x, weight, epsilon, weight_offset=0.0):
    return ops.rms_norm(x, weight, epsilon)


def ignores_epsilon(x, weight, epsilon, weight_offset=0.0):
    return ops.rms_norm(x, weight, 0.0, weight_offset)


def stays_wide(x, *rest, **options):
    return ops.rms_norm(x.float(), *rest, **options)


def transposed_shape(x, *rest, **options):
    return ops.rms_norm(x, *rest, **options).transpose(0, -1).contiguous()


def not_contiguous(x, *rest, **options):
    return ops.rms_norm(x, *rest, **options).repeat_interleave(2, -1)[..., ::2]


def returns_nothing(x, *rest, **options):
    ops.rms_norm(x, *rest, **options)


def one_result_too_many(x, *rest, **options):
    return ops.rms_norm(x, *rest, **options), x.clone()


def nan_in_one_element(x, *rest, **options):
    y = ops.rms_norm(x, *rest, **options)
    y.view(-1)[-1:] = float("nan")
    return y


def leaves_out_the_last_row(x, *rest, **options):
    y = ops.rms_norm(x, *rest, **options)
    y[-1:] = 0
    return y


def writes_its_input(x, *rest, **options):
    y = ops.rms_norm(x, *rest, **options)
    x.mul_(2)
    return y


def works_in_place(x, *rest, **options):
    return x.copy_(ops.rms_norm(x, *rest, **options))


def writes_the_padding(x, *rest, **options):
    y = ops.rms_norm(x, *rest, **options)
    if x.untyped_storage().nbytes() > x.nbytes:
        torch.as_strided(x, (1,), (1,), x.storage_offset() + x.shape[-1]).fill_(7)
    return y


def reads_the_padding(x, *rest, **options):
    flat = torch.as_strided(x, x.shape, torch.empty(x.shape).stride(), x.storage_offset())
    return ops.rms_norm(flat, *rest, **options)


def mixes_rows(x, *rest, **options):
    return ops.rms_norm(x, *rest, **options) + 0 * x.sum()


def raises(x, *rest, **options):
    raise RuntimeError("out of shared memory")


def broadcasts_a_short_weight(x, weight, *rest, **options):
    return ops.rms_norm(x, None if weight is None else weight.expand(x.shape).flatten(0, -2)[0], *rest, **options)


# Each broken norm, with words of the failure that it must cause.
BROKEN_NORMS = {
    wrong_factor: "times the tolerance",
    slightly_wrong_factor: "times the tolerance",
    adds_noise_to_small_values: "times the tolerance",
    mean_instead_of_mean_square: "times the tolerance",
    ignores_the_offset: "times the tolerance",
    ignores_epsilon: "times the tolerance",
    stays_wide: "is torch.float32, not torch.bfloat16",
    transposed_shape: "has shape",
    not_contiguous: "is not contiguous",
    returns_nothing: "gave [] where the contract says ['result 0']",
    one_result_too_many: "gave ['result 0', 'result 1'] where the contract says ['result 0']",
    nan_in_one_element: "off by inf times the tolerance",
    leaves_out_the_last_row: "times the tolerance",
    writes_its_input: "wrote to its input x",
    works_in_place: "result 0 lies in the memory of ['x'], not of []",
    writes_the_padding: "wrote to its input x",
    reads_the_padding: "off by inf times the tolerance",
    mixes_rows: "NaN in one row changes another",
    raises: "raised RuntimeError: out of shared memory",
    broadcasts_a_short_weight: "did not raise ValueError",
}


@pytest.mark.parametrize("run", BROKEN_NORMS, ids=lambda run: run.__name__)
def test_a_broken_kernel_is_caught(run):
    assert_caught(ops.rms_norm, run, BROKEN_NORMS[run])


def norm_of_the_rounded_sum(x, residual, *rest, **options):
    residual.add_(x)
    x.copy_(ops.rms_norm(residual, *rest, **options))


def leaves_the_residual(x, residual, *rest, **options):
    ops.fused_add_rms_norm(x, residual.clone(), *rest, **options)


def writes_beside_the_residual(x, residual, *rest, **options):
    ops.fused_add_rms_norm(x, residual, *rest, **options)
    if residual.untyped_storage().nbytes() > residual.nbytes:
        torch.as_strided(residual, (1,), (1,), residual.storage_offset() + residual.shape[-1]).fill_(7)


def writes_the_weight(x, residual, weight, *rest, **options):
    ops.fused_add_rms_norm(x, residual, weight, *rest, **options)
    if weight is not None:
        weight.zero_()


def returns_what_it_wrote(x, residual, *rest, **options):
    ops.fused_add_rms_norm(x, residual, *rest, **options)
    return x, residual


BROKEN_FUSED_NORMS = {
    norm_of_the_rounded_sum: "x was not normalised from the sum in fp32",
    leaves_the_residual: "times the tolerance",
    writes_beside_the_residual: "wrote outside the view it was given of residual",
    writes_the_weight: "wrote to its input weight",
    returns_what_it_wrote: "gave ['residual', 'result 0', 'result 1', 'x'] where",
}


@pytest.mark.parametrize("run", BROKEN_FUSED_NORMS, ids=lambda run: run.__name__)
def test_a_broken_kernel_in_place_is_caught(run):
    assert_caught(ops.fused_add_rms_norm, run, BROKEN_FUSED_NORMS[run])


def rotates_the_wrong_way(positions, query, key, head_size, cos_sin_cache, is_neox_style=True):
    cos, sin = cos_sin_cache.chunk(2, dim=-1)
    backwards = torch.cat((cos, -sin), dim=-1)
    ops.rotary_embedding(positions, query, key, head_size, backwards, is_neox_style)


def knows_one_style(positions, query, key, head_size, cos_sin_cache, is_neox_style=True):
    ops.rotary_embedding(positions, query, key, head_size, cos_sin_cache, True)


def rotates_a_copy(positions, query, key, head_size, cos_sin_cache, is_neox_style=True):
    ops.rotary_embedding(positions, query.clone(), key, head_size, cos_sin_cache, is_neox_style)


def forgets_the_key(positions, query, key, head_size, cos_sin_cache, is_neox_style=True):
    ops.rotary_embedding(positions, query, None, head_size, cos_sin_cache, is_neox_style)


def reads_every_row_of_the_table(positions, query, key, head_size, cos_sin_cache, is_neox_style=True):
    query += 0 * cos_sin_cache.sum()
    ops.rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox_style)


BROKEN_ROTATIONS = {
    rotates_the_wrong_way: "times the tolerance",
    knows_one_style: "times the tolerance",
    rotates_a_copy: "times the tolerance",
    forgets_the_key: "times the tolerance",
    reads_every_row_of_the_table: "off by inf times the tolerance",
}


@pytest.mark.parametrize("run", BROKEN_ROTATIONS, ids=lambda run: run.__name__)
def test_a_broken_rotation_is_caught(run):
    assert_caught(ops.rotary_embedding, run, BROKEN_ROTATIONS[run])


def test_writing_to_a_tensor_within_an_argument_is_caught():
    def spoils_the_block_table(query, kv_cache, batch, *rest, **options):
        ops.paged_attention(query, kv_cache, batch, *rest, **options)
        batch.block_table.zero_()

    assert_caught(ops.paged_attention, spoils_the_block_table, "wrote to its input batch.block_table")


def test_a_broken_property_is_caught():
    def rotates_by_one_more(positions, *rest, **options):
        ops.rotary_embedding(positions.clamp(max=98) + 1, *rest, **options)

    where = "position 0 rotates: Tensor-likes are not equal! Mismatched elements: "
    assert_caught(ops.rotary_embedding, rotates_by_one_more, where)


def test_what_a_kernel_does_not_support_is_skipped_with_its_reason():
    def supports(problem):
        return "only 64 columns" if problem.hidden_size != 64 else None

    def run(x, *rest, **options):
        assert x.shape[-1] in (0, 64), "was called with what it does not support"
        return ops.rms_norm(x, *rest, **options)

    checks = list(parity.check_kernel(ops.rms_norm, Kernel("rms_norm", "mine", "tests", (), supports, run), DEVICE))
    assert {check.skipped for check in checks} == {None, "only 64 columns"}
    assert {check.outcome for check in checks} == {"passed", "skipped"}
    assert all((check.outcome == "skipped") == (check.skipped is not None) for check in checks)
    assert all(check.error is None for check in checks if check.skipped)


@pytest.mark.parametrize("op", [ops.linear, ops.paged_attention, ops.rope_cache], ids=lambda op: op.name)
def test_a_kernel_is_not_called_in_a_dtype_that_it_does_not_support(op):
    """The function that prepares weights is not called either, even for illegal inputs: a processor may lack both."""

    def supports(problem):
        return None if problem.dtype is torch.float32 else "only fp32"

    def in_fp32_alone(*args, **kwargs):
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        unsupported = (torch.bfloat16, torch.float16)
        assert tensors[0].dtype not in unsupported and kwargs.get("out_dtype") not in unsupported

    def run(*args, **kwargs):
        in_fp32_alone(*args, **kwargs)
        return op(*args, **kwargs)

    def prepare(argument, **others):
        in_fp32_alone(argument, **others)
        return argument

    prepared = dict.fromkeys(op.prepared, prepare)
    checks = list(parity.check_kernel(op, Kernel(op.name, "mine", "tests", (), supports, run, prepared), DEVICE))
    assert not [check for check in checks if check.failure]
    refusals = {check.outcome for check in checks if check.case.startswith("refuses ") and check.dtype != torch.float32}
    assert refusals == {"skipped"}


def test_a_wrong_result_is_shown_with_its_index_both_values_and_what_was_allowed():
    """The message uses the words of torch.testing.assert_close. Two elements are wrong; the second has the larger
    error.
    """
    sample = next(sample for sample in ops.silu_and_mul.samples(DEVICE, torch.float32) if sample.make()[0][0].numel())

    def run(x):
        y = ops.silu_and_mul(x)
        y.view(-1)[-2:] = torch.tensor([2.0, 4.0])
        return y

    kernel = Kernel("silu_and_mul", "broken", "tests", (), lambda problem: None, run)
    check = parity.check_sample(ops.silu_and_mul, kernel, sample, torch.float32)
    want = ops.silu_and_mul(sample.make()[0][0].double())
    last, tolerance = tuple(size - 1 for size in want.shape), ops.silu_and_mul.tolerances[torch.float32]
    allowed = sample.scale * tolerance.atol + tolerance.rtol * want[last].abs().item()
    assert f"2 of {want.numel()} elements" in check.failure
    assert f"at index {last}, is 4 where the reference gives {want[last]:g}" in check.failure
    assert f"absolute difference {4 - want[last]:.3g}, allowed {allowed:.3g}" in check.failure
    assert check.error == pytest.approx((4 - want[last].item()) / allowed)


def test_a_wrong_slot_is_shown_with_its_index_and_both_values():
    """Integers have no tolerance."""
    op = ops.compute_slot_mapping

    def run(*args, **kwargs):
        op(*args, **kwargs)
        slots = op.signature.bind(*args, **kwargs).arguments["slot_mapping"]
        slots[:1] = 12345

    checks = parity.check_kernel(op, Kernel(op.name, "broken", "tests", (), lambda problem: None, run), DEVICE)
    failure = next(check.failure for check in checks if check.failure)
    assert re.fullmatch(
        r"slot_mapping must equal the reference's: 1 of \d+ elements \(\S+%\) mismatch; "
        r"the first, at index \(0,\), is 12345 where the reference gives -?\d+",
        failure,
    )


def test_a_missing_refusal_is_shown_with_what_the_contract_demands():
    kernel = Kernel("rms_norm", "broken", "tests", (), lambda problem: None, broadcasts_a_short_weight)
    failures = {check.case: check.failure for check in parity.check_kernel(ops.rms_norm, kernel, DEVICE)}
    assert failures["refuses a weight a token"] == (
        "did not raise ValueError; the contract demands one: "
        "weight and bias must be [64], as x's rows are, and contiguous, not [3, 64] with strides [64, 1]"
    )


def test_the_reference_uses_little_of_its_own_tolerance():
    """Tests fp32, where nothing is rounded to a narrower dtype: a tolerance that the reference needs is too tight."""
    for op in ops.ALL:
        reference = kernels_of(op.name)[REFERENCE]
        for sample in op.samples(DEVICE, torch.float32):
            check = parity.check_sample(op, reference, sample, torch.float32)
            assert (check.error or 0) <= 0.5, f"{op.name} uses {check.error:.2f} of its tolerance on {sample}"


def assert_caught(op: Op, run, words: str) -> None:
    """Asserts that parity fails the implementation, for a reason with these words in it."""
    others = set()
    for check in parity.check_kernel(op, Kernel(op.name, "broken", "tests", (), lambda problem: None, run), DEVICE):
        if check.failure and words in check.failure:
            return
        others.add(check.failure)
    pytest.fail(f"{words!r} is not among {others}")
