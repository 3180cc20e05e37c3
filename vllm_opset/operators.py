"""PyTorch operators derived from the contracts, for models that torch.compile compiles.

A compiler that traces a layer sees the operator `torch.ops.vllm_opset.<op>` and none of the kernel's code. It can
neither trace C++ nor fix what a kernel decides by the sizes of a call. Everything comes from the contract: the schema
from the reference's signature, the mutated arguments from `mutates`, and the shapes of results from the reference,
which PyTorch runs on fake tensors.

The last argument of an operator, `chosen`, names the kernel and the problem that it was chosen for. The engines of a
process may have chosen different kernels, so an operator has no kernel of its own. The name is the same for all layers
with the same problem, so that equal pieces of a graph stay equal, and in every process that loads a cached graph. The
argument cannot be called `kernel`: TorchInductor passes an operator's keywords on beside one of its own of that name.
With BY_CALL in its place, each call chooses.
"""

import functools
from collections.abc import Callable
from inspect import Parameter

import torch
from torch._C import DisableTorchFunctionSubclass

from vllm_opset import ops, selection
from vllm_opset.ops.contract import Op
from vllm_opset.selection import Choice

NAMESPACE = "vllm_opset"
# No compiled code calls these ops, and PyTorch has no schema for them.
WITHOUT_OPERATOR = {
    ops.paged_attention: "vLLM's operator for attention calls it, and a PagedBatch is no type of a schema",
    ops.top_k_top_p_sample: "vLLM compiles models without their samplers, and its second result may be None",
}

BY_CALL = "by each call"  # in place of a kernel's name

_library = torch.library.Library(NAMESPACE, "DEF")
_chosen: dict[tuple[str, str], Callable] = {}


def of(choice: Choice) -> Callable:
    """The operator of the choice's op. It takes the arguments of the op and runs the chosen kernel."""
    name = f"{choice.name} for {choice.problem}"
    _chosen[choice.op, name] = choice.run
    return _operator(choice.op, name)


def choosing(op: Op) -> Callable:
    """The operator of an op with a kernel that each call chooses by its arguments.

    A compiler may trace a layer before the layer has a kernel for a dtype, and it cannot trace the choice.
    """
    return _operator(op.name, BY_CALL)


def _operator(op_name: str, chosen: str) -> Callable:
    return functools.partial(getattr(getattr(torch.ops, NAMESPACE), op_name), chosen=chosen)


def _kernel(op: Op, chosen: str, args: tuple, kwargs: dict) -> Callable:
    return selection.select(op, op.problem_for(*args, **kwargs)).run if chosen == BY_CALL else _chosen[op.name, chosen]


def _define(op: Op) -> None:
    schema = torch.library.infer_schema(_with_choice(op), mutates_args=op.mutates)

    def run(*args, chosen: str, **kwargs):
        # vLLM's parameters are subclasses of Tensor: PyTorch would dispatch every call through __torch_function__.
        with DisableTorchFunctionSubclass():
            return _kernel(op, chosen, args, kwargs)(*args, **kwargs)

    def results(*args, chosen: str, **kwargs):
        return None if op.signature.return_annotation is None else op.reference(*args, **kwargs)

    _library.define(f"{op.name}{schema}")
    _library.impl(op.name, run, "CompositeExplicitAutograd")
    # No operator is differentiable. Without this, PyTorch warns when somebody differentiates what a model computes.
    _library.impl(op.name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"{NAMESPACE}::{op.name}", results, lib=_library)


def _with_choice(op: Op) -> Callable:
    def prototype(): ...

    parameters = [*op.signature.parameters.values(), Parameter("chosen", Parameter.KEYWORD_ONLY, annotation=str)]
    prototype.__signature__ = op.signature.replace(parameters=parameters)
    return prototype


for _op in ops.ALL:
    if _op not in WITHOUT_OPERATOR:
        _define(_op)
