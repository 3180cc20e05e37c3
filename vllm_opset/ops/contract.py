"""What an op is: its semantics, the inputs it is checked with, how close a kernel must come, and what it must cost.

A contract is a plain PyTorch function with a docstring, turned into an `Op` by the decorator `op`. Calling the op runs
that function: it is the reference, the implementation of last resort on every device, and what parity is judged
against. Everything else about the op hangs on it by decorators of its own:

    @op(problem=MyProblem, mutates=("x",))
    def my_op(x, weight): ...

    @my_op.problem_of          # what a kernel is chosen by, read off the arguments of a call
    @my_op.sample_inputs       # inputs for parity: real shapes and the edges
    @my_op.bench_inputs        # inputs for benchmarks: the sizes that real models use
    @my_op.property_           # a law that every kernel must keep, beyond agreeing with the reference
    @my_op.cost                # bytes that must move and FLOP that must be done
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Problem:
    """What is known about a call when its layer is built, and all that a kernel may be chosen by.

    Hashable and printable. Each op extends it with its own fields.

    device: torch device type, such as "cpu" or "cuda". dtype: of the activations.
    """

    device: str
    dtype: torch.dtype

    def __str__(self) -> str:
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return ", ".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in values)


@dataclass(frozen=True)
class Tolerance:
    """|kernel - reference| <= atol + rtol * |reference|, elementwise; `reason` says where the error comes from."""

    rtol: float
    atol: float
    reason: str


# One rounding of the result to the dtype, after accumulation in fp32: half a unit in the last place of it, doubled
# because a rounded intermediate (as the reference itself may have) can move the result by one more step.
ROUND_ONCE = {
    torch.float64: Tolerance(1e-12, 1e-12, "fp64 throughout"),
    torch.float32: Tolerance(2e-6, 2e-6, "fp32 accumulation in another order"),
    torch.bfloat16: Tolerance(2**-7, 1e-3, "fp32 accumulation, one rounding to 8 bits of mantissa"),
    torch.float16: Tolerance(2**-10, 1e-4, "fp32 accumulation, one rounding to 11 bits of mantissa"),
}


@dataclass(frozen=True)
class Cost:
    """What no implementation can avoid: every input byte read once, every output byte written once, and the FLOP."""

    bytes: int
    flops: int


@dataclass(frozen=True)
class Sample:
    """One named input of an op. `make` gives the same fresh tensors at every call, so nothing needs to be cloned."""

    name: str
    make: Callable[[], tuple[tuple, dict]]

    def __str__(self) -> str:
        return self.name


SampleMaker = Callable[[str, torch.dtype], Iterator[Sample]]


class Op:
    """A contract. Call it to run the reference."""

    def __init__(
        self,
        reference: Callable,
        problem: type[Problem],
        mutates: tuple[str, ...],
        dtypes: tuple[torch.dtype, ...],
        tolerances: Mapping[torch.dtype, Tolerance],
    ) -> None:
        self.name: str = reference.__name__
        self.reference = reference
        self.signature = inspect.signature(reference)
        self.problem = problem
        self.mutates = mutates
        self.dtypes = dtypes
        self.tolerances = tolerances
        self.properties: dict[str, Callable[[Callable, str, torch.dtype], None]] = {}
        self.__doc__ = reference.__doc__
        unknown = set(mutates) - set(self.signature.parameters)
        if unknown:
            raise ValueError(f"{self.name} declares that it mutates {sorted(unknown)}, which it does not take")

    def __call__(self, *args, **kwargs):
        return self.reference(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def problem_of(self, describe: Callable[..., Problem]) -> Callable[..., Problem]:
        """Registers how a `Problem` is read off the arguments of one call."""
        self.describe = describe
        return describe

    def sample_inputs(self, make: SampleMaker) -> SampleMaker:
        """Registers `(device, dtype) -> Sample …` for parity: small enough for Triton's interpreter, edges included."""
        self.samples = make
        return make

    def bench_inputs(self, make: SampleMaker) -> SampleMaker:
        """Registers `(device, dtype) -> Sample …` for benchmarks."""
        self.bench_samples = make
        return make

    def cost(self, estimate: Callable[..., Cost]) -> Callable[..., Cost]:
        """Registers the `Cost` of one call, from its arguments."""
        self.cost_of = estimate
        return estimate

    def property_(self, law: Callable[[Callable, str, torch.dtype], None]) -> Callable:
        """Registers `law(implementation, device, dtype)`, which raises AssertionError where the law is broken."""
        self.properties[law.__name__] = law
        return law


def op(
    *,
    problem: type[Problem],
    mutates: tuple[str, ...] = (),
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    tolerances: Mapping[torch.dtype, Tolerance] = ROUND_ONCE,
) -> Callable[[Callable], Op]:
    """Turns a reference into an `Op`.

    problem: the op's `Problem` class. mutates: the parameters that are written in place; all others must be left as
    they are. dtypes: what samples are made in. tolerances: by the dtype of the output that is compared.
    """
    return lambda reference: Op(reference, problem, mutates, dtypes, tolerances)


def accumulator(tensor: torch.Tensor) -> torch.dtype:
    """The dtype that a reference computes in: fp32, or fp64 for fp64 inputs, so that parity can ask for more."""
    return torch.promote_types(tensor.dtype, torch.float32)
