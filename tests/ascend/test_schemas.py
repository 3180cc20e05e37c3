"""The operators that the kernels call have the same schemas in the other supported releases of torch_npu.

Every call of the other tests binds in the installed release, so it binds in those releases too. This does not show
differences between their Meta kernels and wrappers.
"""

import emulation
import pytest
import schemas
import torch

RECORDED = schemas.recorded(emulation.OPERATORS)


def installed(name: str) -> str:
    """The schema of an operator, such as "npu::npu_swiglu"."""
    namespace, operator = name.split("::")
    return str(getattr(getattr(torch.ops, namespace), operator).default._schema)


def normalised(name: str, text: str) -> str:
    return str(torch._C.parse_schema(f"{name.split('::')[0]}::{text}"))


@pytest.mark.parametrize(
    ("release", "name"),
    [(release, name) for release, texts in RECORDED.items() for name in emulation.OPERATORS if name in texts],
)
def test_a_schema_is_the_same_in_another_release(release, name):
    assert normalised(name, RECORDED[release][name]) == installed(name)


@pytest.mark.parametrize("release", RECORDED)
def test_only_schemas_of_atb_are_not_recorded(release):
    missing = set(emulation.OPERATORS) - set(RECORDED[release])
    assert all(name.startswith("atb::") for name in missing), f"record anew, see schemas.py: {missing}"


def test_another_order_would_be_seen():
    text = "npu_top_k_top_p(Tensor logits, Tensor? k=None, Tensor? p=None) -> Tensor"
    assert normalised("npu::npu_top_k_top_p", text) != installed("npu::npu_top_k_top_p")
