"""PyTorch's own checks of the operators that are derived from the contracts."""

import pytest
import torch

from vllm_opset import operators, ops, selection

UNPREPARED = {"linear": "reference", "fused_experts": "reference"}
WITH_OPERATOR = [op for op in ops.ALL if op not in operators.WITHOUT_OPERATOR]
CHECKS = ("test_schema", "test_faketensor")


@pytest.fixture(autouse=True)
def unprepared():
    """Kernels of linear and of experts prepare weights on a CPU, and an operator gets what a layer keeps."""
    selection.configure({"opset": {"kernels": UNPREPARED}})
    yield
    selection.configure()


def call_of(op, sample) -> tuple:
    """The operator of the kernel chosen for a sample, and the arguments of the call."""
    args, kwargs = sample.make()
    operator = operators.of(selection.select(op, op.problem_for(*args, **kwargs)))
    return operator, args, kwargs


@pytest.mark.parametrize("op", WITH_OPERATOR, ids=lambda op: op.name)
def test_an_operator_writes_and_returns_what_its_contract_says(op):
    """Covers the schema (mutated arguments, aliases), results on fake tensors, and tracing, with the chosen kernels."""
    # PyTorch's checks copy the memory of every argument, which fails for an empty slice of a fused projection.
    samples = [sample for sample in op.samples("cpu", op.dtypes[0]) if "zero tokens" not in sample.name]
    for sample in samples:
        operator, args, kwargs = call_of(op, sample)
        # The check of a schema multiplies every argument, which fails for fp8.
        checks = CHECKS[1:] if "fp8" in sample.name else CHECKS
        checks = (*checks, "test_aot_dispatch_dynamic") if sample is samples[0] else checks
        overload = getattr(torch.ops.vllm_opset, op.name).default
        torch.library.opcheck(overload, args, kwargs | operator.keywords, test_utils=checks)


@pytest.mark.parametrize("op", WITH_OPERATOR, ids=lambda op: op.name)
def test_inductor_calls_an_operator(op):
    sample = next(iter(op.samples("cpu", op.dtypes[0])))
    operator, args, kwargs = call_of(op, sample)
    _, *again = call_of(op, sample)
    torch._dynamo.reset()
    compiled = torch.compile(lambda args, kwargs: operator(*args, **kwargs), fullgraph=True, backend="inductor")
    assert_same((compiled(args, kwargs), args, kwargs), (operator(*again[0], **again[1]), *again))


def assert_same(got, want) -> None:
    """Compares results and arguments to the bit, NaN as itself."""
    got, want = (torch.utils._pytree.tree_leaves(tree) for tree in (got, want))
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("op", WITH_OPERATOR, ids=lambda op: op.name)
def test_an_operator_runs_the_chosen_kernel(op):
    sample = next(iter(op.samples("cpu", op.dtypes[0])))
    for kernel in ("reference", None):
        selection.configure({"opset": {"kernels": UNPREPARED | ({op.name: kernel} if kernel else {})}})
        operator, args, kwargs = call_of(op, sample)
        choice = selection.select(op, op.problem_for(*args, **kwargs))
        assert operator.keywords["chosen"].startswith(f"{choice.name} for device=cpu")
        ran = []
        operators._chosen[op.name, operator.keywords["chosen"]] = lambda *args, ran=ran, run=choice.run, **kwargs: (
            ran.append(run) or run(*args, **kwargs)
        )
        operator(*args, **kwargs)
        assert ran == [choice.run]


def test_an_op_without_an_operator_is_none_that_compiled_code_calls():
    """PyTorch has no schema for these. If it had one, the op would belong with the others."""
    for op in operators.WITHOUT_OPERATOR:
        with pytest.raises(ValueError, match="unsupported type"):
            torch.library.infer_schema(op.reference, mutates_args=op.mutates)
        assert not hasattr(torch.ops.vllm_opset, op.name)


def test_a_compiled_model_calls_the_operator_and_can_be_differentiated_around_it(recwarn):
    """PyTorch's default compiler takes the operator. No operator is differentiable, and PyTorch does not warn of it."""
    x, weight = torch.randn(3, 48, requires_grad=True), torch.randn(48)
    choice = selection.select(ops.rms_norm, ops.rms_norm.problem_for(x, weight, 1e-5))
    operator = operators.of(choice)
    with torch.no_grad():
        compiled = torch.compile(lambda x: operator(2 * x, weight, 1e-5) + 1)
        torch.testing.assert_close(compiled(x), operator(2 * x, weight, 1e-5) + 1)
    (operator(x, weight, 1e-5).sum() + x.sum()).backward()
    assert not [warning for warning in recwarn if "autograd kernel was not registered" in str(warning.message)]
