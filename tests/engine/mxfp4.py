"""Small gpt-oss checkpoints with MXFP4 experts, in the format of OpenAI's, and the weights that they stand for.

A checkpoint has `gate_up_proj_blocks` and `down_proj_blocks`, bytes [num_experts, rows, columns / 32, 16] of two values
each, and `…_scales`, bytes [num_experts, rows, columns / 32]. The plain weights [num_experts, columns, rows] are
computed here from the format's definition, and not by the code under test.
"""

import json
from pathlib import Path

import models
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EXPERTS = ("gate_up_proj", "down_proj")
# With 8 experts and 3 choices, some experts have no token in a step. The columns are an odd number of groups.
SIZES = {"hidden_size": 96, "intermediate_size": 64, "num_local_experts": 8, "initializer_range": 0.2}


def build(folder: Path) -> PreTrainedModel:
    """Saves a model whose values and scales are random; all of both occur. Returns it with what they stand for."""
    model = models.build("gpt_oss", folder, **SIZES)
    weights, stored = load_file(folder / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for name in list(weights):
        if name.endswith(EXPERTS):
            num_experts, columns, rows = weights[name].shape
            blocks = torch.randint(0, 256, (num_experts, rows, columns // 32, 16), generator=generator).byte()
            scales = torch.randint(120, 126, (num_experts, rows, columns // 32), generator=generator).byte()
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            weights[name] = values(blocks, scales).mT
        else:
            # Biases of experts are in bf16 in either form.
            stored[name] = weights[name].bfloat16()
            weights[name] = stored[name].float()
    model.load_state_dict(weights)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))
    return model


def values(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[num_experts, rows, columns] in fp32. A byte's low half is the first value, and a scale s is 2 ** (s - 127)."""
    known = torch.tensor([sign * magnitude for sign in (1, -1) for magnitude in MAGNITUDES])
    pairs = torch.stack((known[(blocks % 16).int()], known[(blocks // 16).int()]), dim=-1)
    return (pairs.flatten(-2) * 2.0 ** (scales.float() - 127).unsqueeze(-1)).flatten(-2)
