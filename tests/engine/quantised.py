"""Checkpoints with fp8 and int8 weights, in the formats of llm-compressor (compressed-tensors) and of DeepSeek.

All of a dtype stand for exactly the same weights, which `save_plain` writes in bf16, so that an engine must give the
same tokens for each of them. The weights are values of the dtype times a power of two. The scales of a format differ by
powers of two from channel to channel, from block to block, or from layer to layer.
"""

import json
from pathlib import Path

import models
import torch
from safetensors.torch import load_file, save_file

FP8, INT8 = torch.float8_e4m3fn, torch.int8
BLOCK = 128
# The scale of the plain weights: the largest value becomes 0.875 for fp8, and 0.97 for int8.
STEPS = {FP8: 2.0**-9, INT8: 2.0**-7}
INPUT_SCALE = 2.0**-5  # of activations, where the checkpoint gives it
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4}
SIZES_OF = {"qwen3": SIZES, "qwen3_moe": SIZES | {"moe_intermediate_size": 128}}
ROUTER = "mlp.gate"  # of a mixture of experts, which no checkpoint quantises


def save_plain(folder: Path, dtype: torch.dtype = FP8, model: str = "qwen3") -> dict[str, torch.Tensor]:
    """A small model in bf16, whose linear layers and experts the dtype can hold. Returns its weights."""
    models.build(model, folder, tie_word_embeddings=True, **SIZES_OF[model])
    # vLLM quantises routers too, if it quantises weights while it loads them.
    weights = {
        name: GRIDS[dtype](weight) if is_linear(name) or name.endswith(f"{ROUTER}.weight") else weight
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


GRIDS = {FP8: _fp8_grid, INT8: _int8_grid}


def save_compressed(plain: Path, folder: Path, dtype: torch.dtype, strategy: str = "channel") -> None:
    """llm-compressor's FP8_DYNAMIC and W8A8: a scale for each output channel, activations quantised for each token.

    strategy: "tensor" gives a weight one scale, and all activations one that the checkpoint holds.
    """
    kind, static = "float" if dtype.is_floating_point else "int", strategy == "tensor"
    bits = {"num_bits": 8, "type": kind, "symmetric": True}
    of_weight = bits | {"strategy": strategy, "dynamic": False}
    of_input = bits | {"strategy": "tensor" if static else "token", "dynamic": not static}
    config = {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": of_weight, "input_activations": of_input}},
        "ignore": ["lm_head", f"re:.*{ROUTER}$"],
    }

    def scale_shape(weight: torch.Tensor) -> tuple[int, ...]:
        return (1,) if static else (weight.shape[0], 1)

    _save_quantised(plain, folder, config, "weight_scale", scale_shape, dtype, INPUT_SCALE if static else None)


def save_blockwise(plain: Path, folder: Path) -> None:
    """A scale for each block of 128 x 128 weights, as in DeepSeek-V3 and Qwen3's FP8 checkpoints."""
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    layers = json.loads((plain / "config.json").read_text())["num_hidden_layers"]
    config["modules_to_not_convert"] = ["lm_head", *(f"model.layers.{layer}.{ROUTER}" for layer in range(layers))]
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
            wide = wide.repeat_interleave(repeats, dimension)
        stored = (weight.float() / wide).to(dtype)
        assert torch.equal(stored.float() * wide, weight.float()), "the format cannot hold these weights"
        weights[name], weights[name.replace(".weight", f".{scale_name}")] = stored, scale.float()
        if input_scale is not None:
            weights[name.replace(".weight", ".input_scale")] = torch.tensor([input_scale])
    text = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(text | {"quantization_config": config}))
    _save(folder, weights)


def _load(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def _save(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    kept = {name: tensor if _is_quantised(name, tensor) else tensor.bfloat16() for name, tensor in weights.items()}
    dense = {name: tensor.contiguous() for name, tensor in kept.items()}
    save_file(dense, folder / "model.safetensors", {"format": "pt"})


def _is_quantised(name: str, tensor: torch.Tensor) -> bool:
    return tensor.dtype in (FP8, INT8) or "scale" in name
