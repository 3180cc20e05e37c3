"""Alternatives that users could choose: one file per peer, with one function per op of the op's name and signature.

A peer's `unavailable(device)` returns why the peer cannot be used here, or None. A function raises NotImplementedError,
with the reason, for a case that its peer cannot do. A peer for any op has `any_op(op)` instead.

A function `prepare_<op>`, of the op's signature too, may turn the arguments of a call into those of the function, as
(args, kwargs). Its time does not count: a model does that once for a weight, and an earlier kernel for activations.
"""

import importlib
import pkgutil
from collections.abc import Callable
from types import ModuleType

from vllm_opset.ops.contract import Op

NAMES = tuple(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def peer(name: str) -> ModuleType:
    """The peer of this name, one of NAMES."""
    return importlib.import_module(f"{__name__}.{name}")


def implementation(name: str, op: Op) -> Callable | None:
    """The peer's function for an op, with the signature of the op's reference; None if the peer lacks the op."""
    module = peer(name)
    return module.any_op(op) if hasattr(module, "any_op") else getattr(module, op.name, None)


def preparation(name: str, op: Op) -> Callable[..., tuple[tuple, dict]] | None:
    """The peer's function that prepares the arguments of a call, or None."""
    return getattr(peer(name), f"prepare_{op.name}", None)
