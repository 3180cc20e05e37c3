"""Checkpoints with fp8 weights, in the formats of llm-compressor (compressed-tensors) and of DeepSeek (by blocks).

All stand for exactly the same weights, which `save_plain` writes in bf16, so that an engine must give the same tokens
for each of them. The weights are fp8 values times a power of two. The scales of a format differ by powers of two from
channel to channel or from block to block.
"""

import json
from pathlib import Path

import models
import torch
from safetensors.torch import load_file, save_file

FP8 = torch.float8_e4m3fn
BLOCK = 128
STEP = 2.0**-9  # scale of the plain weights: the largest fp8 value becomes 0.875
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4}


def save_plain(folder: Path) -> dict[str, torch.Tensor]:
    """A small model in bf16, whose linear layers fp8 can hold. Returns its weights."""
    models.build("qwen3", folder, tie_word_embeddings=True, **SIZES)
    weights = {name: _on_grid(weight) if is_linear(name) else weight for name, weight in _load(folder).items()}
    _save(folder, weights)
    return weights


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def _on_grid(weight: torch.Tensor) -> torch.Tensor:
    """Values that fp8 holds exactly with scales of STEP, 2 * STEP and 4 * STEP. The largest is fp8's, times STEP."""
    stored = (weight.float() / weight.abs().max() * 448).to(FP8).float()
    stored[stored.abs() < 2**-4] = 0  # divided by 4, these would lose bits
    stored[0, 0] = 448
    return stored * STEP


def save_channelwise(plain: Path, folder: Path) -> None:
    """llm-compressor's FP8_DYNAMIC: a scale for each output channel, activations quantised for each token."""
    of_weight = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    of_input = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    group = {"targets": ["Linear"], "weights": of_weight, "input_activations": of_input}
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    _save_quantised(plain, folder, config, "weight_scale", lambda weight: (weight.shape[0], 1))


def save_blockwise(plain: Path, folder: Path) -> None:
    """A scale for each block of 128 x 128 weights, as in DeepSeek-V3 and Qwen3's FP8 checkpoints."""
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    _save_quantised(
        plain, folder, config, "weight_scale_inv", lambda weight: tuple(-(-size // BLOCK) for size in weight.shape)
    )


def _save_quantised(plain: Path, folder: Path, config: dict, scale_name: str, scale_shape) -> None:
    generator, weights = torch.Generator().manual_seed(0), {}
    for name, weight in _load(plain).items():
        if not is_linear(name):
            weights[name] = weight
            continue
        exponents = torch.randint(0, 3, scale_shape(weight), generator=generator)
        scale = STEP * 2.0**exponents
        wide = scale
        for dimension, size in enumerate(weight.shape):
            repeats = 1 if wide.shape[dimension] in (1, size) else BLOCK
            wide = wide.repeat_interleave(repeats, dimension)
        stored = (weight.float() / wide).to(FP8)
        assert torch.equal(stored.float() * wide, weight.float()), "the format cannot hold these weights"
        weights[name], weights[name.replace(".weight", f".{scale_name}")] = stored, scale.float()
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
    return tensor.dtype is FP8 or "scale" in name
