"""How a launch of a Triton kernel of vLLM's second model runner becomes a call of an implementation in Python.

vLLM launches the implementations through its registry of replaced kernels (0.31 and later).
"""

import inspect
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm_opset.platform.bridges import find
from vllm_opset.platform.refusals import Refusal

# Parameters that only a launch on a GPU needs: how memory is laid out, and the sizes of Triton's blocks.
ENDINGS = ("_stride", "_stride_0", "_stride_1", "_BLOCK", "BLOCK_SIZE")


@dataclass(frozen=True)
class Implementation:
    """kernel: the qualified name of vLLM's kernel. ignores: its parameters that the function does not take, by name.

    run: the function. Its parameters are the kernel's, without `_ptr` at the end of their names; a tensor stands for a
    pointer. A parameter with a default value may be absent from the kernel of an older release. compiled: whether it is
    in C++, and comes before another implementation of this kernel.
    """

    kernel: str
    run: Callable[..., None]
    ignores: frozenset[str]
    compiled: bool = False

    def launcher(self, parameters: Iterable[str]) -> Callable[..., None]:
        """The function to call with all arguments of a launch, in the order of the kernel's parameters.

        Raises Refusal if the kernel has parameters that the implementation does not know, or lacks some that it needs.
        """
        names = [name.removesuffix("_ptr") for name in parameters]
        own = inspect.signature(self.run).parameters
        needed = {name for name, parameter in own.items() if parameter.default is parameter.empty}
        unknown = {name for name in names if name not in own.keys() | self.ignores and not name.endswith(ENDINGS)}
        if unknown or not needed <= set(names):
            changed = ", ".join(sorted(unknown | needed - set(names)))
            raise Refusal(
                f"vllm-opset does not know this release's {self.kernel}, whose parameters changed ({changed}): set "
                "VLLM_USE_V2_MODEL_RUNNER=0, which selects vLLM's first model runner."
            )
        taken = [(place, name) for place, name in enumerate(names) if name in own]
        run = self.run

        def launch(*arguments, **constants) -> None:
            given = {name: arguments[place] for place, name in taken if place < len(arguments)}
            run(**given, **{name: value for name, value in constants.items() if name in own})

        return launch


class Registry:
    """The implementations of a device. common: those that it shares with other devices."""

    def __init__(self, common: "Registry | None" = None) -> None:
        self._common, self._own = common, list[Implementation]()
        self._registered = False

    @property
    def implementations(self) -> list[Implementation]:
        return [*(self._common.implementations if self._common else ()), *self._own]

    def implements(self, kernel: str, ignores: str = "", compiled: bool = False) -> Callable[[Callable], Callable]:
        """Note the decorated function for a kernel below `vllm.v1.worker`. ignores: names, separated by spaces."""

        def note(function: Callable[..., None]) -> Callable[..., None]:
            name = f"vllm.v1.worker.{kernel}"
            self._own.append(Implementation(name, function, frozenset(ignores.split()), compiled))
            return function

        return note

    def register(self) -> None:
        """Have vLLM launch these implementations, once in a process.

        Raises Refusal for a kernel that this vLLM has in a form that is not known.
        """
        if self._registered:
            return
        from vllm.triton_utils.dispatcher import register_kernels

        launchers = {}
        for one in sorted(self.implementations, key=lambda one: one.compiled):
            launchers[one.kernel] = one.launcher(parameters(find(one.kernel)))
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # vLLM looks at all names of all modules
            register_kernels(launchers)
        self._registered = True


def parameters(kernel) -> tuple[str, ...]:
    """The names of a kernel's parameters. Without Triton, the kernel is a plain function."""
    return tuple(getattr(kernel, "arg_names", None) or inspect.signature(kernel).parameters)


COMMON = Registry()
implements = COMMON.implements
