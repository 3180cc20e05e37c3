"""What an op is: its semantics, the inputs it is checked with, how close a kernel must come, and what it must cost.

A contract is a plain PyTorch function with a docstring, turned into an `Op` by the decorator `op`. Calling the op runs
that function: it is the reference, the implementation of last resort on every device, and what parity is judged
against. Everything else about the op hangs on it by decorators of its own:

    @op(problem=MyProblem, mutates=("x",))
    def my_op(x, weight): ...

    @my_op.problem_of          # what a kernel is chosen by, read off the arguments of a call
    @my_op.sample_inputs       # inputs for parity: real shapes and the edges
    @my_op.illegal_inputs      # inputs that the reference and every kernel must refuse with a ValueError
    @my_op.property_           # a law that every kernel must keep, beyond agreeing with the reference
    @my_op.bench_inputs        # inputs for benchmarks: the sizes that real models use
    @my_op.cost                # bytes that must move and FLOP that must be done
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields

import torch

from vllm_opset import targets
from vllm_opset.targets import Target

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Problem:
    """What is known about a call when its layer is built, and all that a kernel may be chosen by.

    Hashable and printable. An op whose kernels depend on more extends it with its own fields.

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

    `reason` says where the error comes from.
    """

    rtol: float
    atol: float
    reason: str


# rtol: one rounding of the result to the dtype is half a unit in its last place; doubled, because an intermediate that
# is rounded too (as vLLM's own implementations do) can move the result by one more step. atol: what differences of
# fp32 values of order 1 leave behind, such as 1 + tanh(x) far to the left.
ROUND_ONCE = {
    torch.float64: Tolerance(1e-12, 1e-12, "fp64 throughout"),
    torch.float32: Tolerance(2e-6, 2e-6, "fp32 in another order"),
    torch.bfloat16: Tolerance(2**-7, 1e-5, "fp32, then rounded to 8 bits of mantissa"),
    torch.float16: Tolerance(2**-10, 1e-5, "fp32, then rounded to 11 bits of mantissa"),
}


@dataclass(frozen=True)
class Cost:
    """What no implementation can avoid: every input byte read once, every output byte written once, and the FLOP."""

    bytes: int
    flops: int


@dataclass(frozen=True)
class Sample:
    """One named input of an op. `make` gives the same fresh tensors at every call, so nothing needs to be cloned.

    scale: the magnitude of the inputs, by which the absolute tolerance grows.
    """

    name: str
    make: Callable[[], tuple[tuple, dict]]
    scale: float = 1.0

    def __str__(self) -> str:
        return self.name


SampleMaker = Callable[[str, torch.dtype], Iterator[Sample]]
Law = Callable[[Callable, str, torch.dtype], None]


class Op:
    """A contract. Call it to run the reference."""

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
        self.properties: dict[str, Law] = {}
        self.illegal_samples: SampleMaker = lambda device, dtype: iter(())
        unknown = {*mutates, *prepared} - set(self.signature.parameters)
        if unknown:
            raise ValueError(f"{self.name} declares {sorted(unknown)}, which it does not take")

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

    def illegal_inputs(self, make: SampleMaker) -> SampleMaker:
        """Registers `(device, dtype) -> Sample …` that must raise ValueError: where silently wrong results threaten."""
        self.illegal_samples = make
        return make

    def bench_inputs(self, make: SampleMaker) -> SampleMaker:
        """Registers `(device, dtype) -> Sample …` for benchmarks."""
        self.bench_samples = make
        return make

    def cost(self, estimate: Callable[..., Cost]) -> Callable[..., Cost]:
        """Registers the `Cost` of one call, from its arguments."""
        self.cost_of = estimate
        return estimate

    def property_(self, law: Law) -> Law:
        """Registers `law(implementation, device, dtype)`, which raises AssertionError where the law is broken."""
        self.properties[law.__name__] = law
        return law


def op(
    *,
    problem: type[Problem] = Problem,
    mutates: tuple[str, ...] = (),
    prepared: tuple[str, ...] = (),
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    tolerances: Mapping[torch.dtype, Tolerance] = ROUND_ONCE,
) -> Callable[[Callable], Op]:
    """Turns a reference into an `Op`.

    problem: the op's `Problem` class. mutates: the parameters that may be written in place; all others must be left as
    they are. prepared: the parameters that do not change between calls, of which a kernel may want a form of its own;
    whoever calls it makes that once, by `Kernel.prepared`. dtypes: what samples are made in. tolerances: by the dtype
    of the output that is compared.
    """
    return lambda reference: Op(reference, problem, mutates, prepared, dtypes, tolerances)


def accumulator(*tensors: torch.Tensor) -> torch.dtype:
    """The dtype that a reference computes in: fp32, or fp64 if an input is fp64, so that parity can ask for more."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype
