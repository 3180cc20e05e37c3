"""The contract of an op: its semantics, its inputs for checks, its tolerances and its minimum cost.

A contract is a plain PyTorch function with a docstring. The decorator `op` turns it into an `Op`. Calling the op runs
that function, the reference. The reference is the implementation of last resort on every device, and parity compares
kernels with it. The op's own decorators add everything else:

    @op(problem=MyProblem, mutates=("x",))
    def my_op(x, weight): ...

    @my_op.problem_of          # derives the problem, by which a kernel is chosen, from the arguments of a call
    @my_op.sample_inputs       # inputs for parity: real shapes and edge cases
    @my_op.illegal_inputs      # inputs that the reference and every kernel must refuse with a ValueError
    @my_op.property_           # a property that every kernel must have, beyond agreeing with the reference
    @my_op.bench_inputs        # inputs for benchmarks: the sizes that real models use
    @my_op.random_input        # draws one problem of the sizes that models have, for benchmarks of many
    @my_op.cost                # the bytes and the FLOP that no implementation can avoid
    @my_op.hardware_error      # what the arithmetic of a problem's target adds to the tolerance, if it adds anything
"""

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace

import torch

from vllm_opset import targets
from vllm_opset.targets import Target

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Problem:
    """The facts about a call that are known when its layer is built. The choice of a kernel depends on nothing else.

    A problem is hashable and printable. If the kernels of an op depend on more, the op extends it with its own fields.

    device: torch device type, such as "cpu" or "cuda". dtype: of the activations. target: the kind of device, by
    default that of this machine.
    """

    device: str
    dtype: torch.dtype
    target: Target = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        if self.target is None:
            object.__setattr__(self, "target", targets.of(self.device))

    def __str__(self) -> str:
        values = ((field.name, getattr(self, field.name)) for field in fields(self) if field.repr)
        return ", ".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in values)


@dataclass(frozen=True)
class Tolerance:
    """|kernel - reference| <= scale * atol + rtol * |reference|, elementwise, with the `scale` of the sample.

    `reason` says where the error comes from. The `hardware_error` of an op may add to both.
    """

    rtol: float
    atol: float
    reason: str


# rtol: rounding the result to the dtype costs half a unit in the last place. This is doubled, because a rounded
# intermediate can move the result by one more step, and vLLM's own implementations round intermediates.
# `atol` covers differences of fp32 values of order 1, such as 1 + tanh(x) for very negative x.
ROUND_ONCE = {
    torch.float64: Tolerance(1e-12, 1e-12, "fp64 throughout"),
    torch.float32: Tolerance(2e-6, 2e-6, "fp32 in another order"),
    torch.bfloat16: Tolerance(2**-7, 1e-5, "fp32, then rounded to 8 bits of mantissa"),
    torch.float16: Tolerance(2**-10, 1e-5, "fp32, then rounded to 11 bits of mantissa"),
}


@dataclass(frozen=True)
class Cost:
    """The work that no implementation can avoid: each input byte read once, each output byte written once, the FLOP.

    factors: the dtype to which activations are quantised before weights multiply them; None if they are not quantised.
    """

    bytes: int
    flops: int
    factors: torch.dtype | None = None


@dataclass(frozen=True)
class Sample:
    """One named input of an op. Each call of `make` creates the same tensors anew, so nothing needs to be cloned.

    scale: the magnitude of the inputs. The absolute tolerance is multiplied by it.
    """

    name: str
    make: Callable[[], tuple[tuple, dict]]
    scale: float = 1.0

    def __str__(self) -> str:
        return self.name


SampleMaker = Callable[[str, torch.dtype], Iterator[Sample]]
PropertyCheck = Callable[[Callable, str, torch.dtype], None]


class Op:
    """A contract. Call it to run the reference.

    Its methods are decorators. They set the attributes `problem_for`, `samples`, `bench_samples` and `cost_of`, which
    every op has, and `draw`, which an op without random problems lacks.
    """

    def __init__(
        self,
        reference: Callable,
        problem: type[Problem],
        mutates: tuple[str, ...],
        prepared: tuple[str, ...],
        dtypes: tuple[torch.dtype, ...],
        tolerances: Mapping[torch.dtype, Tolerance],
    ) -> None:
        self.name: str = reference.__name__
        self.__doc__ = reference.__doc__
        self.reference = reference
        self.signature = inspect.signature(reference)
        self.problem = problem
        self.mutates = mutates
        self.prepared = prepared
        self.dtypes = dtypes
        self.tolerances = tolerances
        self.properties: dict[str, PropertyCheck] = {}
        self.illegal_samples: SampleMaker = lambda device, dtype: iter(())
        self.error_of: Callable[[Problem], float] = lambda problem: 0.0
        unknown = {*mutates, *prepared} - set(self.signature.parameters)
        if unknown:
            raise ValueError(f"{self.name} declares {sorted(unknown)}, which it does not take")

    def __call__(self, *args, **kwargs):
        return self.reference(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def problem_of(self, problem_for: Callable[..., Problem]) -> Callable[..., Problem]:
        """Registers the function that derives a `Problem` from the arguments of one call."""
        self.problem_for = problem_for
        return problem_for

    def sample_inputs(self, make: SampleMaker) -> SampleMaker:
        """Registers `(device, dtype) -> Sample …` for parity: small enough for Triton's interpreter, edges included."""
        self.samples = make
        return make

    def illegal_inputs(self, make: SampleMaker) -> SampleMaker:
        """Registers `(device, dtype) -> Sample …` that must raise ValueError, not give wrong results silently."""
        self.illegal_samples = make
        return make

    def bench_inputs(self, make: SampleMaker) -> SampleMaker:
        """Registers `(device, dtype) -> Sample …` for benchmarks."""
        self.bench_samples = make
        return make

    def random_input(self, draw: Callable[[str, torch.dtype, random.Random], Sample]) -> Callable:
        """Registers `(device, dtype, choices) -> Sample`, a random problem. `choices` makes all decisions on sizes.

        The first word of the sample's name is its kind. Benchmarks compare implementations on each kind as well.
        """
        self.draw = draw
        return draw

    def cost(self, estimate: Callable[..., Cost]) -> Callable[..., Cost]:
        """Registers the function that computes the `Cost` of one call from its arguments."""
        self.cost_of = estimate
        return estimate

    def hardware_error(self, estimate: Callable[[Problem], float]) -> Callable[[Problem], float]:
        """Registers the function that computes the error of the hardware's arithmetic from the problem. By default, 0.

        It is absolute for results of order 1, and relative for larger ones. The `scale` of a sample does not multiply
        it.
        """
        self.error_of = estimate
        return estimate

    def allowed(self, problem: Problem, scale: float) -> dict[torch.dtype, Tolerance]:
        """The tolerances of this problem's results, for a sample of this scale."""
        error = self.error_of(problem)
        return {
            dtype: replace(tolerance, rtol=tolerance.rtol + error, atol=scale * tolerance.atol + error)
            for dtype, tolerance in self.tolerances.items()
        }

    def property_(self, check: PropertyCheck) -> PropertyCheck:
        """Registers `check(implementation, device, dtype)`, which raises AssertionError if a kernel lacks it."""
        self.properties[check.__name__] = check
        return check


def op(
    *,
    problem: type[Problem] = Problem,
    mutates: tuple[str, ...] = (),
    prepared: tuple[str, ...] = (),
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    tolerances: Mapping[torch.dtype, Tolerance] = ROUND_ONCE,
) -> Callable[[Callable], Op]:
    """Turns a reference into an `Op`.

    problem: the op's `Problem` class.

    mutates: the parameters that a kernel may write in place. It must leave all others as they are.

    prepared: the parameters that do not change between calls. A kernel may need them in a form of its own, which the
    caller makes once with `Kernel.prepared`.

    dtypes: the dtypes of the samples. tolerances: one for each dtype of a compared output.
    """
    return lambda reference: Op(reference, problem, mutates, prepared, dtypes, tolerances)


def accumulator(*tensors: torch.Tensor) -> torch.dtype:
    """The dtype in which a reference computes: fp32, or fp64 if an input is fp64, so that parity can be stricter."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype
