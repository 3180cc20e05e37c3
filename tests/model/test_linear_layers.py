"""vLLM's layers with weights, multiplying by ops.linear, against vLLM's own."""

import dataclasses

import pytest
import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from vllm_opset import kernel as registry
from vllm_opset import operators, selection
from vllm_opset.model import linear, packed_linear
from vllm_opset.platform import compile_cache
from vllm_opset.platform.refusals import Refusal
from vllm_opset.variants import Variant, Variants

pytestmark = [pytest.mark.window, pytest.mark.usefixtures("alone")]


def layers() -> torch.nn.ModuleDict:
    return torch.nn.ModuleDict(
        {
            "replicated": ReplicatedLinear(48, 64),
            "column": ColumnParallelLinear(48, 64),
            "row": RowParallelLinear(48, 64, bias=False),
            "head": ParallelLMHead(128, 48),
            "embedding": VocabParallelEmbedding(128, 48),
        }
    )


@pytest.mark.parametrize("num_tokens", [1, 16, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_multiply_as_before(num_tokens, dtype):
    model = layers().to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=48**-0.5)
    x = torch.randn(num_tokens, 48, dtype=dtype)
    before = {name: layer.quant_method.apply(layer, x, None) for name, layer in model.items()}
    packed_linear.bind(model)
    for name, layer in model.items():
        torch.testing.assert_close(layer.quant_method.apply(layer, x, None), before[name], rtol=2**-7, atol=1e-5)
    assert {choice.op for choice in selection.choices()} == {"linear"}


def test_an_embedding_still_looks_up():
    layer = VocabParallelEmbedding(128, 48)
    torch.nn.init.normal_(layer.weight)
    ids = torch.tensor([3, 0, 127])
    packed_linear.bind(layer)
    assert torch.equal(layer(ids), layer.weight[ids])


def test_weights_that_are_loaded_again_are_used():
    model = layers()
    packed_linear.bind(model)
    layer, x = model["row"], torch.randn(2, 48)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(64, 48))
    assert torch.equal(layer(x)[0][:, :48], x)
    layer.weight.data = torch.zeros(64, 48)
    layer.quant_method.process_weights_after_loading(layer)
    assert not layer(x)[0].any()


def test_weights_are_packed_at_loading_and_again_when_they_change():
    """A head that is also an embedding differs: vLLM does not always report a change, so `refresh` packs it again."""
    model = layers().bfloat16()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    packed_linear.bind(model)
    x, tied = torch.ones(2, 48, dtype=torch.bfloat16), model["embedding"]
    if model["row"].weight.numel():
        pytest.skip(
            "nothing is packed without a compiler or oneDNN in bf16: runs with g++ 12, or on a processor with AVX-512"
        )
    with pytest.raises(Refusal, match="has packed this model's weights"):
        packed_linear.need_weights(model)
    assert not tied.quant_method.apply(tied, x).any()
    model["row"].weight.data = torch.ones(64, 48, dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in (tied, model["head"]):
            layer.weight.fill_(1)
    packed_linear.refresh(model)
    for layer in (tied, model["row"], model["head"]):
        assert (layer.quant_method.apply(layer, x) == 48).all()


def test_a_model_that_was_loaded_uses_a_kernel_of_the_users_choice():
    selection.configure({"opset": {"kernels": {"linear": "reference"}}})
    packed_linear.bind(layers())
    assert {choice.kernel.name for choice in selection.choices()} == {"reference"}


# As on a GPU, where weights stay unpacked.


@pytest.fixture
def reference():
    """Selects the reference, because the CPU kernels prepare weights."""
    selection.configure({"opset": {"kernels": {"linear": "reference"}}})


@pytest.mark.parametrize("compiled", [False, True])
def test_weights_that_stay_may_be_replaced_and_changed(compiled, reference):
    """vLLM does this when it loads weights again, layer by layer, or moves them."""
    model, x = layers(), torch.ones(2, 48)
    linear.bind(model, compiled)
    for name in ("row", "head", "embedding"):
        layer = model[name]
        for value in (1, 2):
            layer.weight.data = torch.full_like(layer.weight.data, value)
            assert (layer.quant_method.apply(layer, x) == 48 * value).all()
        with torch.no_grad():
            layer.weight.fill_(3)
        assert (layer.quant_method.apply(layer, x) == 48 * 3).all()


def test_a_compiler_is_given_an_operator_of_any_number_of_rows(reference, monkeypatch):
    """One graph serves all numbers of rows, and the kernel sees the actual number."""
    model, rows = layers(), []
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=48**-0.5)
    layer = model["replicated"]
    before = layer.quant_method
    linear.bind(model, compiled=True)
    for handle, run in operators._chosen.items():
        if handle[0] == "linear":
            monkeypatch.setitem(operators._chosen, handle, seeing(run, rows))
    compiled = torch.compile(lambda x: layer(x)[0], fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (5, 1, 16):
        x = torch.randn(num_tokens, 48)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), before.apply(layer, x, layer.bias))
    assert rows == [5, 1, 16]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_second_model_leaves_the_first_one_its_kernel(compiled, monkeypatch):
    """Two engines of one process do this if they start with different overrides."""
    names, found = ("reference", "another"), []
    known = {name: dataclasses.replace(registry.kernels_of("linear")["reference"], name=name) for name in names}
    monkeypatch.setitem(registry._registry, "linear", known)
    models = []
    for name in names:
        selection.forget()
        selection.configure({"opset": {"kernels": {"linear": name}}})
        run = seeing(known[name].run, found, what=name)
        monkeypatch.setitem(known, name, dataclasses.replace(known[name], run=run))
        models.append(layers())
        linear.bind(models[-1], compiled)
    for model, name in zip(models, names, strict=True):
        layer = model["replicated"]
        torch.nn.init.normal_(layer.weight)
        call = torch.compile(lambda x, layer=layer: layer(x)[0], fullgraph=True, backend="aot_eager")
        for multiply in (lambda x, layer=layer: layer(x)[0], call) if compiled else (layer,):
            multiply(torch.randn(3, 48))
            assert found.pop() == name and not found


def test_a_graph_is_found_by_engines_that_chose_the_same_kernels(monkeypatch):
    """A graph names kernels with the variants that users ask for, and an environment variable may ask for these."""
    varied = dataclasses.replace(
        registry.kernels_of("linear")["reference"],
        name="varied",
        variants=Variants(lambda *args: None, Variant("fast"), Variant("usual")),
    )
    monkeypatch.setitem(registry._registry["linear"], "varied", varied)
    names, hashes = ("reference", "cpu", "varied", "varied:fast"), []
    for name in (*names, *names):
        config = VllmConfig()
        selection.forget()
        monkeypatch.setenv("OPSET_KERNELS", f"linear={name}")
        selection.configure()
        linear.bind(layers(), compiled=True)
        compile_cache.keep_kernels_apart(config)
        hashes.append(config.compute_hash())
    assert hashes[: len(names)] == hashes[len(names) :] and len({*hashes}) == len(names)


def seeing(run, seen_by: list, what: str | None = None):
    """`run`, recording at each call its number of rows, or `what`."""

    def seen(x, weight, bias=None):
        seen_by.append(what or len(x))
        return run(x, weight, bias)

    return seen


@pytest.mark.parametrize("compiled", [False, True])
def test_a_warm_up_multiplies_few_rows_by_each_kind(compiled, reference, monkeypatch):
    model, rows = layers(), []
    model["again"] = ReplicatedLinear(48, 64)
    for name in ("replicated", "head"):
        choice = linear.choice(model[name].weight)
        monkeypatch.setattr(choice, "run", seeing(choice.run, rows))
    linear.bind(model, compiled)
    linear.multiply(model, 6)
    # For [64, 48] with a bias, [64, 48] without, and the head's [128, 48].
    assert rows == 3 * [1, 2, 4, 6]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("is_head", [True, False])
def test_a_warm_up_multiplies_by_an_embedding_that_is_the_head(is_head, compiled, reference, monkeypatch):
    """Gemma-2 and Command-R have no other layer for it. Pooling models have neither a head nor logits."""
    model, rows = torch.nn.ModuleDict({"embedding": VocabParallelEmbedding(128, 48)}), []
    if is_head:
        model["logits_processor"] = LogitsProcessor(128)
    choice = linear.choice(model["embedding"].weight)
    monkeypatch.setattr(choice, "run", seeing(choice.run, rows))
    linear.bind(model, compiled)
    linear.multiply(model, 3)
    assert rows == ([1, 2, 3] if is_head else [])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_kernel_may_prepare_weights_on_every_device(compiled, monkeypatch):
    """The layers of a GPU as well, compiled or not. Linear layers give up the original, and embeddings keep it."""
    known = registry.kernels_of("linear")["reference"]
    packing = dataclasses.replace(
        known,
        name="packing",
        prepare={"weight": lambda weight: -2 * weight},
        run=lambda x, weight, bias=None: known.run(x, weight / -2, bias),
    )
    monkeypatch.setitem(registry._registry["linear"], "packing", packing)
    selection.configure({"opset": {"kernels": {"linear": "packing"}}})
    model, x = layers(), torch.randn(5, 48)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    before = {name: layer.quant_method.apply(layer, x, None) for name, layer in model.items()}
    linear.bind(model, compiled)
    for name, layer in model.items():
        assert torch.equal(layer.quant_method.apply(layer, x, None), before[name])
        assert bool(layer.weight.numel()) == (name in ("head", "embedding"))
    linear.multiply(model, 1)
    layer = model["row"]
    layer.weight.data = torch.eye(64, 48)
    packed_linear.refresh(model)
    assert torch.equal(layer(x)[0][:, :48], x)


@pytest.mark.parametrize("compiled", [False, True])
def test_convolutions_keep_their_method(compiled, reference):
    """vLLM keeps the weights of some convolutions in a linear layer, with one more dimension."""
    model = layers()
    model["row"].weight.data = model["row"].weight.data.unsqueeze(1)
    linear.bind(model, compiled)
    assert type(model["row"].quant_method) is UnquantizedLinearMethod
    linear.multiply(model, 1)
