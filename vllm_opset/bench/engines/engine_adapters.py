"""Random LoRA adapters of a model's attention layers. An engine that a benchmark times writes and loads them.

It needs only vLLM and safetensors, because it runs in environments without this project.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 16


def engine_args(adapters: int) -> dict:
    """The arguments of `LLM` for an engine with that many adapters."""
    return {"enable_lora": True, "max_loras": adapters, "max_lora_rank": RANK}


def requests(model: Path, adapters: int) -> list:
    """LoRARequests for new adapters. model: the folder of its config.json. The adapters are written below it."""
    from vllm.lora.request import LoRARequest

    config = json.loads((model / "config.json").read_text())
    made = []
    for number in range(1, adapters + 1):
        folder = model / f"adapters of {os.getpid()}" / str(number)  # several engines share the model's folder
        folder.mkdir(parents=True)
        write(config, folder)
        made.append(LoRARequest(f"adapter-{number}", number, str(folder)))
    return made


def write(config: Mapping, folder: Path) -> None:
    """Writes an adapter in PEFT's format. Its weights are small: speed does not depend on them."""
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{side}.weight": torch.randn(shape) / 100
        for layer in range(config["num_hidden_layers"])
        for name, (inputs, outputs) in _projections(config).items()
        for side, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK)))
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    peft = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**peft, "target_modules": [*_projections(config)]}))


def _projections(config: Mapping) -> dict[str, tuple[int, int]]:
    """The inputs and outputs of each projection around attention."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_size = config.get("head_dim") or hidden // heads
    queries, keys = heads * head_size, config["num_key_value_heads"] * head_size
    return {
        "q_proj": (hidden, queries),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
    }
