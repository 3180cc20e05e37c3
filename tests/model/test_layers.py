"""vLLM's layers with opset's kernels, against the vLLM code that they replace."""

import contextlib
import functools

import pytest
import torch
from vllm.config import CompilationMode

from vllm_opset import selection
from vllm_opset.model import layers, registration

pytestmark = pytest.mark.window

DTYPE = torch.float32
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@contextlib.contextmanager
def configured(**compilation):
    """vLLM's configuration while layers are built, without a model."""
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config

    config = VllmConfig(compilation_config=CompilationConfig(**compilation))
    with set_current_vllm_config(config):
        yield config


@pytest.fixture(autouse=True)
def fresh():
    selection.configure()
    selection.forget()
    with configured():
        yield


def randomise(layer: torch.nn.Module) -> torch.nn.Module:
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def chosen() -> set[str]:
    return {choice.op for choice in selection.choices()}


def gemma_norm():
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm

    return GemmaRMSNorm(48, eps=1e-5)


def norm(**arguments):
    from vllm.model_executor.layers.layernorm import RMSNorm

    return RMSNorm(48, eps=1e-5, **arguments)


def hardware_agnostic_norm():
    pytest.importorskip("vllm.model_executor.hw_agnostic", reason="came with 0.28: ends with it as the oldest")
    from vllm.model_executor.hw_agnostic.layers.layernorm import RMSNorm

    return RMSNorm(48, eps=1e-5)


@pytest.mark.parametrize("make", [norm, gemma_norm, functools.partial(norm, has_weight=False), hardware_agnostic_norm])
def test_norms(make):
    layer = randomise(make())
    x, residual = torch.randn(5, 48), torch.randn(5, 48)
    torch.testing.assert_close(layer(x.clone()), layer.forward_native(x.clone()), **TOLERANCE)
    expected = layer.forward_native(x.clone(), residual.clone())
    torch.testing.assert_close(layer(x.clone(), residual.clone()), expected, **TOLERANCE)
    assert chosen() == {"rms_norm", "fused_add_rms_norm"}


def test_norm_over_a_part_is_left_to_vllm():
    layer = randomise(norm(var_hidden_size=16))
    x = torch.randn(5, 48)
    torch.testing.assert_close(layer(x), layer.forward_native(x))
    assert chosen() == set()


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "partial": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64},
    "mrope": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
    "mrope interleaved": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 6, 6],
        "mrope_interleaved": True,
    },
}


@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("name", ROPES)
def test_rotary_embeddings(name, is_neox_style):
    from vllm.model_executor.layers.rotary_embedding import get_rope

    layer = get_rope(32, 128, is_neox_style, ROPES[name], dtype=DTYPE)
    layer.bind(DTYPE)
    assert isinstance(layer, layers.RotaryEmbeddingLayer)
    positions = torch.randint(0, 128, (3, 7) if "mrope" in name else (7,))
    query, key = torch.randn(7, 4 * 32), torch.randn(7, 2 * 32)
    expected = layer.forward_native(positions, query.clone(), key.clone())
    torch.testing.assert_close(layer(positions, query.clone(), key.clone()), expected, **TOLERANCE)
    if "mrope" in name:
        expected = layer.forward_native(positions[0], query.clone(), key.clone())
        torch.testing.assert_close(layer(positions[0], query.clone(), key.clone()), expected, **TOLERANCE)
    else:
        rotated, nothing = layer(positions, query.clone(), None)
        torch.testing.assert_close(rotated, expected[0], **TOLERANCE)
        assert nothing is None
    assert chosen() == {"rotary_embedding"}


# The layers, each with several sets of arguments.
ACTIVATIONS = {
    "SiluAndMul": [{}],
    "MulAndSilu": [{}],
    "GeluAndMul": [{}, {"approximate": "tanh"}],
    "GeluAndMulSparse": [{"activation_sparsity": 0.95}, {"activation_sparsity": 0.3, "approximate": "tanh"}],
    "SwigluOAIAndMul": [{}, {"alpha": 1.1, "limit": 0.5}],
    "SiluAndMulWithClamp": [{"swiglu_limit": 1.5}, {"swiglu_limit": 1.0, "alpha": 1.7, "beta": 1.0}],
    "FatreluAndMul": [{}, {"threshold": 0.5}],
    "SwigluStepAndMul": [{}, {"limit": 0.5}],
    "SituAndMul": [{}, {"beta": 1.5, "linear_beta": 2.0}],
    "GELU": [{}],
    "GELUTanh": [{}],
    "NewGELU": [{}],
    "FastGELU": [{}],
    "QuickGELU": [{}],
    "ReLUSquaredActivation": [{}],
}


# Steps of the dtype that vLLM may be off, if more than elsewhere: it rounds the cut-off and multiplies its error by up.
ROUNDED = {"GeluAndMulSparse": 32}


@pytest.mark.parametrize("kernel", [None, "reference"])
@pytest.mark.parametrize(
    ("name", "arguments"), [(name, arguments) for name, sets in ACTIVATIONS.items() for arguments in sets], ids=str
)
def test_activations(name, arguments, kernel):
    from vllm.model_executor.layers import activation

    if not hasattr(activation, name):
        pytest.skip(f"{name} came with vLLM 0.27: ends when 0.27 is the oldest supported release")
    layer = getattr(activation, name)(**arguments)
    (op,) = chosen()
    selection.configure({"opset": {"kernels": {op: kernel} if kernel else {}}})
    layer.bind(DTYPE)
    for dtype in (DTYPE, torch.bfloat16, torch.float16):
        x = (2 * torch.randn(5, 154)).to(dtype)
        # vLLM rounds intermediates: that costs a step of the dtype or two.
        error = 1e-5 if dtype == DTYPE else ROUNDED.get(name, 4) * torch.finfo(dtype).eps
        torch.testing.assert_close(layer(x), layer.forward_native(x), rtol=error, atol=error)
    assert chosen() == {op}
    assert not kernel or {choice.kernel.name for choice in selection.choices()} == {kernel}


def test_hardware_agnostic_activation():
    pytest.importorskip("vllm.model_executor.hw_agnostic", reason="came with 0.28: ends with it as the oldest")
    from vllm.model_executor.hw_agnostic.layers.activation import SiluAndMul

    layer, x = SiluAndMul(), torch.randn(5, 64)
    torch.testing.assert_close(layer(x), layer.forward_native(x), **TOLERANCE)
    assert chosen() == {"silu_and_mul"}


def test_layer_norm():
    from vllm.model_executor.layers import layernorm

    if not hasattr(layernorm.LayerNorm, "register_oot"):
        pytest.skip("vLLM up to 0.31 uses torch.nn.LayerNorm: ends when 0.32 is the oldest supported release")
    layer, x = randomise(layernorm.LayerNorm(48)), torch.randn(5, 48)
    torch.testing.assert_close(layer(x), layer.forward_native(x), **TOLERANCE)
    assert chosen() == {"layer_norm"}
    bare = layernorm.LayerNorm(48, elementwise_affine=False)
    torch.testing.assert_close(bare(x), bare.forward_native(x), **TOLERANCE)


@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("arguments", [{}, {"group_size": 16}, {"activation": "sigmoid"}], ids=str)
def test_gated_norm(arguments, norm_before_gate):
    from vllm.model_executor.layers.layernorm import RMSNormGated

    layer = randomise(RMSNormGated(48, norm_before_gate=norm_before_gate, **arguments))
    x, z = torch.randn(5, 48), torch.randn(5, 48)
    for gate in (z, None):
        torch.testing.assert_close(layer(x, gate), layer.forward_native(x, gate), **TOLERANCE)
    assert isinstance(layer, layers.OpsetLayer) and chosen() == {"rms_norm_gated"}


@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("shape", [(7, 4, 32), (2, 7, 4, 32)])
def test_rotation_by_gathered_angles(shape, is_neox_style):
    from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb

    layer = ApplyRotaryEmb(is_neox_style=is_neox_style, enable_fp32_compute=True)
    angles = 6 * torch.rand(7, 16)
    for dtype in (DTYPE, torch.bfloat16):
        x = torch.randn(shape, dtype=dtype)
        error = {"rtol": 2**-8, "atol": 2**-8} if dtype != DTYPE else TOLERANCE
        expected = layer.forward_native(x, angles.cos(), angles.sin())
        torch.testing.assert_close(layer(x, angles.cos(), angles.sin()), expected, **error)
    assert isinstance(layer, layers.OpsetLayer) and chosen() == {"apply_rotary_emb"}


def test_every_activation_is_tested():
    replaced = {
        replacement.cls for replacement in registration.REPLACEMENTS if replacement.module.endswith(".activation")
    }
    assert replaced == set(ACTIVATIONS)


def test_layers_can_be_switched_off_by_their_own_names():
    with configured(custom_ops=["all", "-rms_norm", "-silu_and_mul"]):
        from vllm.model_executor.layers.activation import SiluAndMul

        x = torch.randn(5, 48)
        off, act = norm(), SiluAndMul()
        assert chosen() == set()
        torch.testing.assert_close(off(x), off.forward_native(x))
        torch.testing.assert_close(act(x), act.forward_native(x))
        gemma_norm()
        assert chosen() == {"rms_norm", "fused_add_rms_norm"}


def test_layers_older_than_an_engine_follow_its_choices():
    model = torch.nn.Sequential(norm())
    selection.configure({"opset": {"kernels": {"rms_norm": "reference"}}})
    layers.bind(model, DTYPE)
    (choice,) = [choice for choice in selection.choices() if choice.op == "rms_norm"]
    assert choice.kernel.name == "reference" and model[0]._norm[DTYPE] is choice.run


def rotary_embedding():
    from vllm.model_executor.layers.rotary_embedding import get_rope

    return get_rope(32, 128, True, ROPES["default"], dtype=DTYPE)


def gated_activation():
    from vllm.model_executor.layers.activation import SiluAndMul

    return SiluAndMul()


# The op that each of these layers calls.
OPS = {
    "norm": "rms_norm",
    "norm with residual": "fused_add_rms_norm",
    "activation": "silu_and_mul",
    "rotary embedding": "rotary_embedding",
}
# Layers, and their inputs: tensors of these widths, after the positions.
CALLS = {
    "norm": (norm, (), (48,)),
    "norm with residual": (norm, (), (48, 48)),
    "activation": (gated_activation, (), (64,)),
    "rotary embedding": (rotary_embedding, (torch.arange(5),), (64, 32)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_a_layer_takes_activations_of_another_dtype_than_it_was_built_for(name, dtype):
    """vLLM's own tests build layers under fp32, convert them and call them in fp16."""
    make, positions, widths = CALLS[name]
    layer = randomise(make())
    for convert in (lambda: None, lambda: layer.to(dtype)):
        convert()
        given = *positions, *(torch.randn(5, width, dtype=dtype) for width in widths)
        expected = layer.forward_native(*(x.clone() for x in given))
        torch.testing.assert_close(layer(*given), expected, rtol=2**-6, atol=2**-6)
    before = selection.choices()
    layer(*given)
    assert dtype in {choice.problem.dtype for choice in before} and selection.choices() == before, "chosen once"


@pytest.mark.parametrize("kernel", [None, "reference"])
@pytest.mark.parametrize("name", CALLS)
def test_a_compiler_sees_a_layers_operators(name, kernel):
    """Compiled layers run the chosen kernels of every dtype, for any number of tokens, and give the same bits."""
    torch.compiler.reset()
    make, positions, widths = CALLS[name]
    with configured() as config:
        selection.configure({"opset": {"kernels": {OPS[name]: kernel} if kernel else {}}})
        config.compilation_config.mode = CompilationMode.VLLM_COMPILE
        layer = randomise(make())
        layer.bind(DTYPE)  # as a worker does, since vLLM shares rotary embeddings
    graphs = []

    def backend(graph: torch.fx.GraphModule, _):
        graphs.append({str(node.target) for node in graph.graph.nodes if node.op == "call_function"})
        return graph

    compiled = torch.compile(lambda *given: layer(*given), fullgraph=True, dynamic=True, backend=backend)
    for dtype in (DTYPE, torch.float16):
        for num_tokens in (5, 3):
            given = *(x[:num_tokens] for x in positions), *(torch.randn(num_tokens, n, dtype=dtype) for n in widths)
            # Traced before the layer has chosen a kernel for fp16. In Llama 4, it is for norms in fp32.
            actual = compiled(*(x.clone() for x in given))
            torch.testing.assert_close(actual, layer(*given), rtol=0, atol=0)
    for targets in graphs:
        assert {target for target in targets if target.startswith("vllm_opset.")} == {f"vllm_opset.{OPS[name]}"}
    used = {choice.kernel.name for choice in selection.choices() if choice.op == OPS[name]}
    assert used == {"reference"} if kernel else "reference" not in used


@pytest.mark.parametrize(
    "make",
    [
        lambda heads: torch.randn(2, 7, heads * 32),
        lambda heads: torch.randn(2, 7, heads, 32),
        lambda heads: torch.randn(2, 7, heads, 48)[..., :32],
        lambda heads: torch.randn(2, 7, 9 * 32)[..., 32 : 32 * (1 + heads)],
        lambda heads: torch.randn(7, 2, heads * 32).transpose(0, 1),
        lambda heads: torch.randn(14, heads * 32),
    ],
)
@pytest.mark.parametrize("with_key", [True, False])
def test_rotary_embeddings_of_several_sequences(make, with_key):
    """vLLM's layers also take positions [batch, seq_len], and query and key in any shape with as many rows."""
    layer, positions = rotary_embedding(), torch.randint(0, 128, (2, 7))
    query, key = make(4), make(2) if with_key else None
    copies = query.contiguous(), key if key is None else key.contiguous()
    expected = layer.forward_native(positions, *copies)
    torch.testing.assert_close(layer(positions, query, key), expected, **TOLERANCE)


def test_ir_ops_reach_the_same_kernels():
    from vllm.platforms import current_platform

    ir = pytest.importorskip("vllm.ir", reason="vLLM has no IR after 0.33: ends, with model/ir.py, when 0.33 leaves")
    current_platform.import_ir_kernels()
    x, residual, weight = torch.randn(5, 48), torch.randn(5, 48), torch.randn(48)
    for op, arguments in (
        (ir.ops.rms_norm, (x, weight, 1e-5)),
        (ir.ops.fused_add_rms_norm, (x, residual, weight, 1e-5)),
    ):
        expected = op.impls["native"].impl_fn(*(a.clone() if torch.is_tensor(a) else a for a in arguments))
        actual = op.impls["opset"].impl_fn(*(a.clone() if torch.is_tensor(a) else a for a in arguments))
        torch.testing.assert_close(actual, expected, **TOLERANCE)
    assert chosen() == {"rms_norm", "fused_add_rms_norm"}
    assert not ir.ops.rms_norm.impls["opset"].supports_args(x, weight, 1e-5, 16)
