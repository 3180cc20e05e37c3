"""Checkpoints with fp8, int8 and int4 weights, in the formats of llm-compressor (compressed-tensors), DeepSeek, AutoAWQ
and GPTQ.

All of a dtype stand for exactly the same weights, which `save_plain` writes in bf16, so that an engine must give the
same tokens for each of them. The weights are values of the dtype times a power of two. The scales of a format differ by
powers of two from channel to channel, from block to block, or from layer to layer.
"""

import json
from pathlib import Path

import models
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

FP8, INT8, INT4 = torch.float8_e4m3fn, torch.int8, torch.uint4
BLOCK = 128
# The scale of the plain weights: the largest value becomes 0.875 for fp8, 0.97 for int8, and 0.75 for int4.
STEPS = {FP8: 2.0**-9, INT8: 2.0**-7, INT4: 2.0**-2}
INPUT_SCALE = 2.0**-5  # of activations, where the checkpoint gives it
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4}
EXPERTS = SIZES | {"moe_intermediate_size": 128}
SIZES_OF = {
    "qwen3": SIZES,
    "qwen3_moe": EXPERTS,
    "qwen2_moe": EXPERTS | {"head_dim": 32, "shared_expert_intermediate_size": 256},
    "glm4_moe": EXPERTS | {"tie_word_embeddings": False},  # vLLM ties none of its models
}
ROUTER = "mlp.gate"  # of a mixture of experts, which no checkpoint quantises
HEAD = "lm_head"  # which few checkpoints quantise


def build(model: str, folder: Path) -> PreTrainedModel:
    """Saves a small model with int4 weights, as compressed-tensors stores them in groups with zero points.

    Returns transformers' model of the weights that they stand for.
    """
    save_plain(folder, INT4, model)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    save_int4(folder, folder, "compressed-tensors", 32, zero_points=True)
    return reference.eval()


def save_plain(folder: Path, dtype: torch.dtype = FP8, model: str = "qwen3", **changes) -> dict[str, torch.Tensor]:
    """A small model in bf16, whose linear layers and experts the dtype can hold. Returns its weights."""
    models.build(model, folder, **{"tie_word_embeddings": True} | SIZES_OF[model] | changes)
    # vLLM quantises routers too, if it quantises weights while it loads them.
    weights = {
        name: GRIDS[dtype](weight)
        if is_linear(name) or name.endswith((f"{ROUTER}.weight", f"{HEAD}.weight"))
        else weight
        for name, weight in _load(folder).items()
    }
    _save(folder, weights)
    return weights


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def _fp8_grid(weight: torch.Tensor) -> torch.Tensor:
    """Values that fp8 holds exactly with scales of a step, 2 and 4 steps. The largest is fp8's, times a step."""
    stored = (weight.float() / weight.abs().max() * 448).to(FP8).float()
    stored[stored.abs() < 2**-4] = 0  # divided by 4, these would lose bits
    stored[0, 0] = 448
    return stored * STEPS[FP8]


def _int8_grid(weight: torch.Tensor) -> torch.Tensor:
    """Values that int8 holds exactly with scales of a step, 2 and 4 steps."""
    return (weight.float() / weight.abs().max() * 31).round() * 4 * STEPS[INT8]


def _int4_grid(weight: torch.Tensor) -> torch.Tensor:
    """Values that 4 bits hold exactly with scales of a step and half a step, and zero points from 6 to 9."""
    return (weight.float() / weight.abs().max() * 3).round() * STEPS[INT4]


GRIDS = {FP8: _fp8_grid, INT8: _int8_grid, INT4: _int4_grid}


def save_compressed(plain: Path, folder: Path, dtype: torch.dtype, strategy: str = "channel") -> None:
    """llm-compressor's FP8_DYNAMIC and W8A8: a scale for each output channel, activations quantised for each token.

    strategy: "tensor" gives a weight one scale, and all activations one that the checkpoint holds.
    """
    static = strategy == "tensor"
    config = _compressed_config(dtype, strategy)

    def scale_shape(weight: torch.Tensor) -> tuple[int, ...]:
        return (1,) if static else (weight.shape[0], 1)

    _save_quantised(plain, folder, config, "weight_scale", scale_shape, dtype, INPUT_SCALE if static else None)


def _compressed_config(dtype: torch.dtype, strategy: str) -> dict:
    """The quantization_config of `save_compressed`."""
    kind, static = "float" if dtype.is_floating_point else "int", strategy == "tensor"
    bits = {"num_bits": 8, "type": kind, "symmetric": True}
    of_weight = bits | {"strategy": strategy, "dynamic": False}
    of_input = bits | {"strategy": "tensor" if static else "token", "dynamic": not static}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": of_weight, "input_activations": of_input}},
        "ignore": [HEAD, f"re:.*{ROUTER}$"],
    }


def save_blockwise(plain: Path, folder: Path) -> None:
    """A scale for each block of 128 x 128 weights, as in DeepSeek-V3 and Qwen3's FP8 checkpoints."""
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    layers = json.loads((plain / "config.json").read_text())["num_hidden_layers"]
    config["modules_to_not_convert"] = [HEAD, *(f"model.layers.{layer}.{ROUTER}" for layer in range(layers))]
    _save_quantised(
        plain, folder, config, "weight_scale_inv", lambda weight: tuple(-(-size // BLOCK) for size in weight.shape)
    )


def _save_quantised(
    plain: Path,
    folder: Path,
    config: dict,
    scale_name: str,
    scale_shape,
    dtype: torch.dtype = FP8,
    input_scale: float | None = None,
) -> None:
    generator, weights = torch.Generator().manual_seed(0), {}
    for name, weight in _load(plain).items():
        if not is_linear(name):
            weights[name] = weight
            continue
        exponents = torch.randint(0, 3, scale_shape(weight), generator=generator)
        scale = STEPS[dtype] * 2.0**exponents
        wide = scale
        for dimension, size in enumerate(weight.shape if wide.ndim > 1 else ()):
            repeats = 1 if wide.shape[dimension] in (1, size) else BLOCK
            wide = wide.repeat_interleave(repeats, dimension)[: weight.shape[0], : weight.shape[1]]
        stored = (weight.float() / wide).to(dtype)
        assert torch.equal(stored.float() * wide, weight.float()), "the format cannot hold these weights"
        weights[name], weights[name.replace(".weight", f".{scale_name}")] = stored, scale.float()
        if input_scale is not None:
            weights[name.replace(".weight", ".input_scale")] = torch.tensor([input_scale])
    _save_config(plain, folder, config)
    _save(folder, weights)


def save_int4(
    plain: Path, folder: Path, method: str, group: int, zero_points: bool = False, with_head: bool = False
) -> None:
    """int4 weights in groups of so many columns (-1: whole rows), as "awq", "gptq" or "compressed-tensors" store them.

    AWQ always has zero points, and GPTQ none here. with_head: compressed-tensors stores the head so, too.
    """
    generator = torch.Generator().manual_seed(0)

    def exactly(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shape = weight.shape[0], 1 if group == -1 else weight.shape[1] // group
        scale = STEPS[INT4] * 2.0 ** -torch.randint(0, 2, shape, generator=generator)
        zeros = torch.randint(6, 10, shape, generator=generator) if zero_points else torch.full(shape, 8)
        values = _quotients(weight, scale) + zeros.repeat_interleave(weight.shape[1] // shape[1], 1)
        assert values.min() >= 0 and values.max() <= 15, "the format cannot hold these weights"
        return values, scale, zeros

    _save_int4(plain, folder, method, group, zero_points, exactly, with_head)


def round_to_int4(source: Path, folder: Path, group: int) -> None:
    """A trained model's weights, rounded to nearest, with zero points, as AWQ stores them."""

    def nearest(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        groups = weight.float().unflatten(1, (-1, group))
        least, largest = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = ((largest - least) / 15).clamp(min=2**-20).bfloat16().float()
        zeros = (-least / scale).round().int().clamp(0, 15)
        return (_quotients(weight, scale) + zeros.repeat_interleave(group, 1)).clamp(0, 15), scale, zeros

    _save_int4(source, folder, "awq", group, True, nearest)


def round_to_int8(source: Path, folder: Path) -> None:
    """A trained model's weights, rounded to nearest, with a scale for each output channel (W8A8)."""
    weights = _load(source)
    for name in filter(is_linear, [*weights]):
        scale = weights[name].float().abs().amax(1, keepdim=True) / 127
        weights[name.replace(".weight", ".weight_scale")] = scale
        weights[name] = _quotients(weights[name], scale).to(INT8)
    _save_config(source, folder, _compressed_config(INT8, "channel"))
    _save(folder, weights)


def _quotients(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (weight.float() / scale.repeat_interleave(weight.shape[1] // scale.shape[1], 1)).round().int()


def _save_int4(
    plain: Path, folder: Path, method: str, group: int, zero_points: bool, quantise, with_head: bool = False
) -> None:
    """quantise: gives a weight's values from 0 to 15, its scales and its zero points."""
    weights = {}
    for name, weight in _load(plain).items():
        if not is_linear(name) and not (with_head and name == f"{HEAD}.weight"):
            weights[name] = weight
            continue
        values, scale, zeros = quantise(weight)
        tensors = LAYOUTS[method](values, scale.bfloat16(), zeros, zero_points)
        weights |= {f"{name.removesuffix('.weight')}.{of}": tensor for of, tensor in tensors.items()}
    # AWQ leaves out every layer whose name contains one of these, so a dense model's gate_up_proj too.
    routers = [ROUTER] if any(".experts." in name for name in weights) else []
    config = {
        "awq": {"zero_point": True, "version": "gemm", "modules_to_not_convert": routers},
        "gptq": {"desc_act": False, "sym": True, "checkpoint_format": "gptq", "dynamic": {rf"-:.*{ROUTER}$": {}}},
        "compressed-tensors": {
            "format": "pack-quantized",
            "ignore": [*([] if with_head else [HEAD]), f"re:.*{ROUTER}$"],
            "config_groups": {},
        },
    }[method]
    if method != "compressed-tensors":
        config |= {"bits": 4, "group_size": group}
    else:
        strategy = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
        of_weight = {"num_bits": 4, "type": "int", "symmetric": not zero_points, "dynamic": False} | strategy
        config["config_groups"]["group_0"] = {"targets": ["Linear", HEAD], "weights": of_weight}
    _save_config(plain, folder, config | {"quant_method": method})
    _save(folder, weights)


def _save_config(plain: Path, folder: Path, quantization_config: dict) -> None:
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": quantization_config}
    (folder / "config.json").write_text(json.dumps(config))


def _awq(values: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor, _) -> dict[str, torch.Tensor]:
    """AutoAWQ's `gemm`: outputs are packed, the even ones of eight in the low half of an int32."""

    def packed(tensor: torch.Tensor) -> torch.Tensor:
        outputs = tensor.t().unflatten(1, (-1, 8))
        return _int32(outputs[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1))

    return {"qweight": packed(values), "qzeros": packed(zeros), "scales": scale.t()}


def _gptq(values: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor, _) -> dict[str, torch.Tensor]:
    """GPTQ's: inputs are packed. Zero points are stored less one, and every checkpoint has the groups of its inputs."""
    groups = torch.arange(values.shape[1], dtype=torch.int32) // (values.shape[1] // scale.shape[1])
    return {"qweight": _int32(values).t(), "qzeros": _int32(zeros.t() - 1), "scales": scale.t(), "g_idx": groups}


def _compressed(values: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor, zero_points: bool) -> dict:
    """compressed-tensors' pack-quantized: inputs are packed, and of zero points outputs."""
    tensors = {"weight_packed": _int32(values), "weight_scale": scale, "weight_shape": torch.tensor(values.shape)}
    return tensors | ({"weight_zero_point": _int32(zeros.t()).t()} if zero_points else {})


LAYOUTS = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed}


def _int32(values: torch.Tensor) -> torch.Tensor:
    """Eight values of 4 bits in a row as an int32, from the low bits up."""
    shifted = values.long().unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
    return shifted.sum(-1).to(torch.int32)


def _load(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def _save(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    kept = {name: tensor if _is_quantised(name, tensor) else tensor.bfloat16() for name, tensor in weights.items()}
    dense = {name: tensor.contiguous() for name, tensor in kept.items()}
    save_file(dense, folder / "model.safetensors", {"format": "pt"})


def _is_quantised(name: str, tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or tensor.dtype is FP8 or "scale" in name
