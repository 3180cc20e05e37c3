"""The variants of a kernel: its ways to run a call, such as decode and prefill of attention, by the sizes of the call.

Which kernel serves an op is chosen once, when a layer is built. Which of its variants runs depends on each call. A
kernel declares its variants in a table, and everybody reads that table: the kernel itself, the warm-up, reports, and
the override `OPSET_KERNELS="paged_attention=triton:prefill"`. So nobody else knows the sizes at which variants change.

    VARIANTS = Variants(
        describe,                                     # (*args, **kwargs) of a call -> what a variant is chosen by
        Variant("decode", can=fits_one_tile),
        Variant("prefill"),
        warm=batches,                                 # Limits -> the sizes of calls that reach all that is compiled
    )

    @kernel(ops.paged_attention, name="triton", supports=supports, variants=VARIANTS)
    def paged_attention(query, ..., variant: str | None = None): ...
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Limits:
    """The largest sizes that serving can ask for, by vLLM's names: tokens of a step, requests, tokens of a request."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int


def always(call: Any) -> bool:
    """Whatever the call."""
    return True


@dataclass(frozen=True)
class Variant:
    """One way to run a call.

    can: whether the variant is able to run it. suits: whether it is the variant to take, where no override says so.
    plans_on_device: whether one captured graph of it serves all lengths of requests, since the device plans the call.
    """

    name: str
    can: Callable[[Any], bool] = always
    suits: Callable[[Any], bool] = always
    plans_on_device: bool = False


class Variants:
    """A kernel's variants, in the order in which they are asked. The last one runs any call."""

    def __init__(
        self,
        describe: Callable[..., Any],
        *variants: Variant,
        warm: Callable[[Limits], Iterator[Any]] = lambda limits: iter(()),
    ) -> None:
        if variants[-1].can is not always or variants[-1].suits is not always:
            raise ValueError(f"the last variant, {variants[-1].name}, must run any call")
        self.describe = describe
        self.warm = warm
        self.by_name = {variant.name: variant for variant in variants}

    def pick(self, call: Any, wanted: str | None = None) -> str:
        """The variant that runs a call. wanted: the user's, which runs every call that it can."""
        if wanted is not None and self.by_name[wanted].can(call):
            return wanted
        return next(name for name, variant in self.by_name.items() if variant.suits(call) and variant.can(call))

    def able(self, call: Any) -> list[str]:
        """The variants that can run a call."""
        return [name for name, variant in self.by_name.items() if variant.can(call)]

    def of(self, wanted: str | None, *args, **kwargs) -> str:
        """The variant that runs a call of the kernel with these arguments."""
        return self.pick(self.describe(*args, **kwargs), wanted)


def powers_up_to(largest: int) -> Iterator[int]:
    """1, 2, 4 … and the largest."""
    yield from itertools.takewhile(lambda size: size < largest, (1 << n for n in itertools.count()))
    yield largest
