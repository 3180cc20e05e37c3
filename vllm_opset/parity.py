"""Checks of a kernel against its contract: all samples against the reference in fp64, all refusals, all properties.

The test suite, `vllm-opset parity` and the authors of kernels use the same checks.
"""

import dataclasses
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal

import torch

from vllm_opset.deviation import Deviation, deviation, worst
from vllm_opset.kernel import REFERENCE, Kernel
from vllm_opset.ops.contract import DTYPES, Op, Problem, Sample, Tolerance

Tensors = Mapping[str, torch.Tensor]
Outcome = Literal["passed", "failed", "skipped"]

# Devices that have fp64 and all of PyTorch's operators. Results from other devices are checked on the CPU.
CHECKED_ON = ("cpu", "cuda")


@dataclass(frozen=True)
class Check:
    """The verdict of one check.

    error: the largest deviation as a share of the tolerance; more than 1 fails. failure: the fault, or None. skipped:
    why the kernel does not support the case; None if it ran. A skipped check has not passed.
    """

    op: str
    kernel: str
    dtype: torch.dtype
    case: str
    error: float | None = None
    failure: str | None = None
    skipped: str | None = None

    @property
    def outcome(self) -> Outcome:
        if self.failure is not None:
            return "failed"
        return "passed" if self.skipped is None else "skipped"


def check_kernel(op: Op, kernel: Kernel, device: str, dtypes: Iterable[torch.dtype] | None = None) -> Iterator[Check]:
    """Check every sample, illegal sample and property of the op, in every dtype or in these."""
    for dtype in op.dtypes if dtypes is None else dtypes:
        for sample in op.samples(device, dtype):
            yield check_sample(op, kernel, sample, dtype)
            if device == "cuda" and kernel.provider != REFERENCE:  # references may read lengths back
                yield check_replay(op, kernel, sample, dtype)
        for sample in op.illegal_samples(device, dtype):
            yield check_refusal(op, kernel, sample, device, dtype)
        for name in op.properties:
            yield check_property(op, kernel, name, device, dtype)


def check_sample(op: Op, kernel: Kernel, sample: Sample, dtype: torch.dtype) -> Check:
    """Run kernel and reference on the sample's inputs, and compare the results and the arguments they have written."""
    args, kwargs = sample.make()
    error = failure = None
    problem = op.problem_for(*args, **kwargs)
    unsupported = kernel.supports(problem)
    if unsupported is None:
        returned, failure = _attempt(kernel.call, args, kwargs)
        if failure is None:
            call = Call.of(op, args, kwargs, returned)
            failure = _malformed(call, Call.to_reference(op, sample)) or _trespassed(op, call, sample)
            if failure is None:
                found = _deviation(call, Call.to_reference(op, sample, _wide), op.allowed(problem, sample.scale))
                error, failure = found.share, None if found.share <= 1 else found.describe()
    return Check(op.name, kernel.name, dtype, sample.name, error, failure, unsupported)


def check_replay(op: Op, kernel: Kernel, sample: Sample, dtype: torch.dtype) -> Check:
    """`check_sample` on a captured and replayed CUDA graph, on a separate stream. Run `check_sample` itself before."""
    check = check_sample(op, dataclasses.replace(kernel, run=_replayed(kernel.run)), sample, dtype)
    return dataclasses.replace(check, case=f"{check.case}, captured and replayed")


def _replayed(run: Callable) -> Callable:
    def capture_and_replay(*args, **kwargs):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin()
            try:
                returned = run(*args, **kwargs)
            finally:
                with warnings.catch_warnings():
                    # The graph of a call with no tokens is empty. For other calls, wrong results would reveal it.
                    warnings.filterwarnings("ignore", "The CUDA Graph is empty")
                    graph.capture_end()
            graph.replay()
        torch.cuda.synchronize()
        return returned

    return capture_and_replay


def check_refusal(op: Op, kernel: Kernel, sample: Sample, device: str, dtype: torch.dtype) -> Check:
    """Run the kernel on inputs that its contract forbids. It is skipped if the kernel does not support the problem."""
    args, kwargs = sample.make()
    failure = None
    unsupported = kernel.supports(_problem_of_refusal(op, sample, device, dtype))
    if unsupported is None:
        _, error = _raised(kernel.call, args, kwargs)
        if not isinstance(error, ValueError):
            _, demanded = _raised(op.reference, *sample.make())
            did = "did not raise ValueError" if error is None else f"raised {_summary(error)} instead of ValueError"
            failure = f"{did}; the contract demands one: {demanded}"
    return Check(op.name, kernel.name, dtype, f"refuses {sample.name}", failure=failure, skipped=unsupported)


def _problem_of_refusal(op: Op, sample: Sample, device: str, dtype: torch.dtype) -> Problem:
    """The problem of illegal inputs. If they are too wrong to describe one, the problem of the op's first sample."""
    args, kwargs = sample.make()
    problem, error = _raised(op.problem_for, args, kwargs)
    if error is None:
        return problem
    args, kwargs = next(iter(op.samples(device, dtype))).make()
    return op.problem_for(*args, **kwargs)


def check_property(op: Op, kernel: Kernel, name: str, device: str, dtype: torch.dtype) -> Check:
    """Run one property of the op against the kernel. It is skipped if the kernel does not support its inputs."""
    check = op.properties[name]
    skipped: list[str] = []

    def run(*args, **kwargs):
        unsupported = kernel.supports(op.problem_for(*args, **kwargs))
        if unsupported is not None:
            skipped.append(unsupported)
            return op.reference(*args, **kwargs)
        return kernel.call(*args, **kwargs)

    _, failure = _attempt(check, (run, device, dtype), {})
    case = f"property: {name.replace('_', ' ')}"
    return Check(op.name, kernel.name, dtype, case, failure=failure, skipped=skipped[0] if skipped else None)


def _attempt(run: Callable, args: tuple, kwargs: dict) -> tuple[Any, str | None]:
    """The return value of `run`, and its failure as text, so that one broken case does not hide all others."""
    returned, error = _raised(run, args, kwargs)
    if error is None:
        return returned, None
    if isinstance(error, AssertionError):
        return None, " ".join(str(error).split()) or f"does not hold: {_summary(error)}"
    return None, f"raised {_summary(error)}"


def _raised(run: Callable, args: tuple, kwargs: dict) -> tuple[Any, Exception | None]:
    """The return value of `run`, or the exception that it raised."""
    try:
        return run(*args, **kwargs), None
    except Exception as error:
        return None, error


def _summary(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno}: {frame.line})"


@dataclass(frozen=True)
class Call:
    """One finished call of an implementation.

    tensors: its tensor arguments, by the names of the parameters. outcome: its return values and the arguments that it
    must write.
    """

    tensors: Tensors
    outcome: Tensors

    @classmethod
    def of(cls, op: Op, args: tuple, kwargs: dict, returned: Any) -> "Call":
        bound = op.signature.bind(*args, **kwargs).arguments
        tensors = _tensors(bound)
        values = enumerate(returned if isinstance(returned, tuple) else (returned,))
        results = {f"result {i}": value for i, value in values if isinstance(value, torch.Tensor)}
        return cls(tensors, results | {name: tensors[name] for name in op.mutates if name in tensors})

    @classmethod
    def to_reference(cls, op: Op, sample: Sample, convert: Callable[[Any], Any] = lambda value: value) -> "Call":
        args, kwargs = sample.make()
        args, kwargs = tuple(map(convert, args)), {name: convert(value) for name, value in kwargs.items()}
        return cls.of(op, args, kwargs, op.reference(*args, **kwargs))

    def inputs_behind(self, name: str) -> list[str]:
        """The inputs that share the memory of a part of the outcome."""
        tensor = self.outcome[name]
        return [name for name, other in self.tensors.items() if tensor.numel() and _base(other) == _base(tensor)]


def _tensors(arguments: Mapping[str, Any]) -> Tensors:
    """The tensors among the arguments. A tensor in a dataclass among them has the name "argument.field"."""
    found: dict[str, torch.Tensor] = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif is_dataclass(value):
            found |= _tensors({f"{name}.{key}": field for key, field in vars(value).items()})
    return found


def _wide(value: Any) -> Any:
    """An argument for the reference in fp64. A dtype, which is that of a result, becomes fp64 too.

    Quantised values become the same numbers, and the reference multiplies them by their scales in fp64.
    """
    if is_dataclass(value):
        fields = {name: _wide(field) for name, field in vars(value).items() if isinstance(field, torch.Tensor)}
        return dataclasses.replace(value, **fields)
    if not isinstance(value, torch.Tensor):
        return torch.float64 if value in DTYPES else value
    return _where_checked(value).to(torch.float64 if value.is_floating_point() else value.dtype)


def _where_checked(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device.type in CHECKED_ON else tensor.cpu()


def _base(tensor: torch.Tensor) -> int:
    """The address at which the memory behind a view starts."""
    return tensor.untyped_storage().data_ptr()


def _malformed(got: Call, expected: Call) -> str | None:
    """A result's fault in shape, dtype or contiguity, or in the memory that it shares with inputs; None without one."""
    if got.outcome.keys() != expected.outcome.keys():
        return f"gave {sorted(got.outcome)} where the contract says {sorted(expected.outcome)}"
    for name, want in expected.outcome.items():
        have = got.outcome[name]
        if have.shape != want.shape:
            return f"{name} has shape {tuple(have.shape)}, not {tuple(want.shape)}"
        if have.dtype != want.dtype:
            return f"{name} is {have.dtype}, not {want.dtype}"
        if want.is_contiguous() and not have.is_contiguous():
            return f"{name} is not contiguous"
        if got.inputs_behind(name) != expected.inputs_behind(name):
            return f"{name} lies in the memory of {got.inputs_behind(name)}, not of {expected.inputs_behind(name)}"
    return None


def _trespassed(op: Op, call: Call, sample: Sample) -> str | None:
    """A write to a tensor that is not in `mutates`, or outside the view of one that is; None if there is none."""
    before = Call.of(op, *sample.make(), None).tensors
    for name in before:
        if not torch.equal(_untouchable(op, before, name), _untouchable(op, call.tensors, name)):
            what = "outside the view it was given of" if name in op.mutates else "to its input"
            return f"wrote {what} {name}"
    return None


def _untouchable(op: Op, tensors: Tensors, name: str) -> torch.Tensor:
    """A copy of all the bytes behind a view, with zeros where a mutated tensor lies."""
    tensor = tensors[name]
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    raw = _where_checked(raw).clone()
    for view in (tensors[mutated] for mutated in op.mutates if mutated in tensors):
        if _base(view) == _base(tensor):
            raw.view(view.dtype).as_strided(view.shape, view.stride(), view.storage_offset()).zero_()
    return raw


def _deviation(got: Call, expected: Call, tolerances: Mapping[torch.dtype, Tolerance]) -> Deviation:
    """The deviation of the worst result."""
    return worst(
        deviation(name, _where_checked(got.outcome[name]), want, tolerances) for name, want in expected.outcome.items()
    )
