"""Norms and activations that quantise their results, in small models whose layers read them in different ways."""

from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from vllm_opset import selection
from vllm_opset.model import quantised_inputs
from vllm_opset.model.packed_linear import run_of
from vllm_opset.model.scaled_linear import ScaledLinear
from vllm_opset.ops.schemes import FP8, PER_ROW, PER_TENSOR, GroupShape, Quantised, Scheme, scales_of, stored

pytestmark = pytest.mark.window

DTYPE, SIZE = torch.bfloat16, 128
ROWS, BLOCKS, WHOLE = (Quantised(FP8, group) for group in (PER_ROW, GroupShape(1, 128), PER_TENSOR))
QUANTISING = {"rms_norm_quant", "fused_add_rms_norm_quant", "silu_and_mul_quant"}


@pytest.fixture(autouse=True)
def serves_with_references(monkeypatch):
    """No kernel for a CPU quantises, which would leave the layers as they are. References give results bit for bit."""
    monkeypatch.setenv("OPSET_COUNT_CALLS", "1")
    monkeypatch.setenv("OPSET_KERNELS", ",".join(f"{op.removesuffix('_quant')}=reference" for op in QUANTISING))
    monkeypatch.setattr(selection, "why_no_kernel", lambda op, problem: None)
    selection.configure()
    selection.forget()
    with set_current_vllm_config(VllmConfig()):
        yield


def linear(outputs: int, columns: int, activation: Quantised = ROWS, scale: float | None = None) -> ScaledLinear:
    weight = torch.randn(outputs, columns)
    scales = scales_of(weight, FP8, PER_ROW)
    x_scale = None if scale is None else torch.full((1, 1), scale)
    scheme = Scheme(Quantised(FP8, PER_ROW), activation)
    product = ScaledLinear(run_of, stored(weight, scales, FP8), scales, scheme, DTYPE, x_scale)
    return lambda x: product(x, None)


class Model(torch.nn.Module):
    """Two layers of a model, with the parts that read their results."""

    norm = RMSNorm

    def __init__(self, **linear_arguments) -> None:
        super().__init__()
        self.first, self.second, self.activation = self.norm(SIZE), self.norm(SIZE), SiluAndMul()
        torch.nn.init.normal_(self.first.weight), torch.nn.init.normal_(self.second.weight)
        self.to(DTYPE)
        self.qkv, self.up = (linear(2 * SIZE, SIZE, **linear_arguments) for _ in range(2))
        self.down = linear(SIZE, SIZE, **linear_arguments)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, residual = x.clone(), x.clone()
        hidden = self.qkv(self.first(x))[:, :SIZE].contiguous()
        hidden, residual = self.second(hidden, residual)
        return self.down(self.activate(self.up(self.normed(hidden)))) + residual

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(x)

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Gemma(Model):
    """Its norms add 1 to their weights."""

    norm = GemmaRMSNorm


class WithRouter(Model):
    """Other layers read a norm's result too, by PyTorch and by its address, as a kernel does."""

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        self.logits = x.float().sum(-1)
        return x


class WithKernel(Model):
    def normed(self, x: torch.Tensor) -> torch.Tensor:
        x.data_ptr()
        return x


class Scaled(Model):
    """A result is changed in place before a linear layer reads it."""

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)


class Otherwise(Model):
    """Two linear layers want a result quantised in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.other = linear(SIZE, SIZE, BLOCKS)

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        self.logits = self.other(x)
        return x


class Copied(Model):
    def activate(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(x).clone()


def config(quantization="fp8", lora=None, mode=0):
    return SimpleNamespace(
        model_config=SimpleNamespace(quantization=quantization, dtype=DTYPE),
        lora_config=lora,
        compilation_config=SimpleNamespace(mode=mode),
        offload_config=VllmConfig().offload_config,
    )


@torch.inference_mode()
def bound(make, **settings) -> tuple[Model, set[str]]:
    """A model after binding, which was checked against itself before, and the ops that quantise in it."""
    torch.manual_seed(0)
    model, x = make(), torch.randn(5, SIZE, dtype=DTYPE)
    expected = model(x)
    quantised_inputs.bind(model, config(**settings), lambda: model(torch.randn(3, SIZE, dtype=DTYPE)))
    for choice in selection.choices():
        choice.calls.clear()
    assert torch.equal(model(x), expected)
    return model, {choice.op for choice in selection.choices() if choice.calls} & QUANTISING


@pytest.mark.parametrize(
    ("make", "quantised"),
    [
        (Model, QUANTISING),
        (Gemma, QUANTISING),
        (lambda: Model(activation=BLOCKS), QUANTISING),
        (lambda: Model(activation=WHOLE, scale=2**-6), QUANTISING),
        (lambda: Model(activation=WHOLE), set()),
        (WithRouter, QUANTISING),
        (WithKernel, QUANTISING),
        (Scaled, QUANTISING - {"fused_add_rms_norm_quant"}),
        (Otherwise, QUANTISING - {"fused_add_rms_norm_quant"}),
        (Copied, QUANTISING - {"silu_and_mul_quant"}),
    ],
    ids=[
        "rows", "Gemma's norms", "blocks", "a given scale", "one scale that is found", "another reader",
        "a kernel that reads", "a result changed in place", "readers that do not agree", "a copy is read",
    ],
)  # fmt: skip
def test_results_are_the_same(make, quantised):
    assert bound(make)[1] == quantised


@pytest.mark.parametrize(
    ("make", "settings", "is_kept"),
    [
        (Model, {}, False),
        (WithRouter, {}, True),
        (WithKernel, {}, True),
        (lambda: Model(activation=WHOLE, scale=2**-6), {}, True),
        (Model, {"lora": object()}, True),
    ],
    ids=["one reader", "another reader", "a kernel that reads", "a given scale", "LoRA"],
)
@torch.inference_mode()
def test_a_result_that_only_linear_layers_read_is_not_written(make, settings, is_kept):
    model, _ = bound(make, **settings)
    x, residual = torch.randn(5, SIZE, dtype=DTYPE), torch.randn(5, SIZE, dtype=DTYPE)
    expected = model.second._forward_method(x.clone(), residual.clone())
    normed, total = model.second(x, residual)
    assert torch.equal(total, expected[1]) and normed.shape == x.shape and normed.dtype == DTYPE
    assert torch.equal(normed, expected[0]) if is_kept else normed.isnan().all()


@pytest.mark.parametrize("settings", [{"quantization": None}, {"mode": 3}], ids=["no quantised weights", "compiled"])
def test_models_that_have_nothing_to_gain_are_not_tried(settings):
    model = Model()
    quantised_inputs.bind(model, config(**settings), lambda: pytest.fail("the model is run"))
    assert model.first.forward == model.first._forward_method


@torch.inference_mode()
def test_inputs_of_another_form_are_left_to_the_layers():
    model, _ = bound(Model)
    x = torch.randn(2, 3, SIZE, dtype=DTYPE)
    assert torch.equal(model.first(x), model.first._forward_method(x))
    wide = torch.randn(3, SIZE)
    for layer in (model.first, model.activation):
        found, expected = layer(wide), layer._forward_method(wide)
        assert found.dtype is torch.float32 and torch.equal(found, expected)


@torch.inference_mode()
def test_a_layer_that_wants_another_form_quantises_by_itself():
    """As after loading weights with another scale."""
    model, _ = bound(lambda: Model(activation=WHOLE, scale=2**-6))
    x, other = torch.randn(5, SIZE, dtype=DTYPE), linear(SIZE, SIZE, WHOLE, 2**-5)
    assert torch.equal(other(model.first(x)), other(model.first._forward_method(x)))
