"""Checkpoints that draft tokens for small models, by vLLM's name of the method. Each function builds target and draft.

Parameters: folders to write to. Returns the target's model of transformers.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import models
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

WEIGHTS = "model.safetensors"
# EAGLE-3 reads the hidden states before these layers of its target.
READ_LAYERS = (0, 1, 2)


def draft_model(target: Path, draft: Path) -> PreTrainedModel:
    """The target drafts for itself, so every drafted token is accepted."""
    models.build("qwen3", draft)
    return models.build("qwen3", target)


def eagle(target: Path, draft: Path) -> PreTrainedModel:
    """A target of one layer, and a head that computes the same but for the first token, which it never sees.

    EAGLE's layer has no norm of its input, and its head none of its output. With rows of length √hidden_size in the
    embedding, and norm weights of 1, the target's norms change neither the layer's input nor the best token.
    """
    model = models.build("llama3", target, num_hidden_layers=1)
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        square = embedding.square().mean(-1, keepdim=True)
        embedding *= torch.where(square > 0, square, 1).rsqrt()  # the row of the padding token is zero
        for norm in (model.model.layers[0].input_layernorm, model.model.norm):
            norm.weight.fill_(1)
    model.save_pretrained(target)
    layer = {f"layers.0.{name}": tensor for name, tensor in _layer(target, 0).items() if "input_layernorm" not in name}
    only_embedding = torch.eye(embedding.shape[1], 2 * embedding.shape[1])
    _save(draft, {**layer, "fc.weight": only_embedding}, _config(target))
    return model


def eagle3(target: Path, draft: Path) -> PreTrainedModel:
    """A random head."""
    model = models.build("llama3", target)
    tensors, hidden_size = _layer(target, 0), model.config.hidden_size
    for name in ("q_proj", "k_proj", "v_proj"):  # these also read the embedding
        weight = tensors[f"self_attn.{name}.weight"]
        tensors[f"self_attn.{name}.weight"] = torch.cat((weight, weight.flip(0)), dim=1)
    head = {f"midlayer.{name}": tensor for name, tensor in tensors.items()} | {
        "midlayer.hidden_norm.weight": torch.ones(hidden_size),
        "fc.weight": torch.eye(hidden_size).repeat(1, len(READ_LAYERS)),
        "norm.weight": torch.ones(hidden_size),
        "lm_head.weight": model.lm_head.weight.detach().clone(),
    }
    own = {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"]}
    own["eagle_aux_hidden_state_layer_ids"] = READ_LAYERS
    _save(draft, head, _config(target) | own)
    return model


def mtp(target: Path, draft: Path) -> PreTrainedModel:
    """A target with experts whose checkpoint has a further layer, which drafts."""
    model = models.build("glm4_moe", target, num_nextn_predict_layers=1)
    last, hidden_size = model.config.num_hidden_layers, model.config.hidden_size
    further = _layer(target, last - 1) | {
        "enorm.weight": torch.ones(hidden_size),
        "hnorm.weight": torch.ones(hidden_size),
        "eh_proj.weight": torch.eye(hidden_size).repeat(1, 2),
        "shared_head.norm.weight": torch.ones(hidden_size),
        "shared_head.head.weight": model.lm_head.weight.detach().clone(),
        "embed_tokens.weight": model.model.embed_tokens.weight.detach().clone(),
    }
    tensors = load_file(target / WEIGHTS) | {f"model.layers.{last}.{name}": one for name, one in further.items()}
    save_file(tensors, target / WEIGHTS, {"format": "pt"})
    return model


def config(method: str, draft: Path, num_tokens: int) -> dict:
    """vLLM's `speculative_config`."""
    folder = {} if method == "mtp" else {"model": str(draft)}
    return {"method": method, "num_speculative_tokens": num_tokens, **folder}


def _layer(folder: Path, index: int) -> dict[str, torch.Tensor]:
    """The weights of a layer of a checkpoint, by their names within it."""
    prefix = f"model.layers.{index}."
    tensors = load_file(folder / WEIGHTS)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def _save(folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


METHODS = {"draft_model": draft_model, "eagle": eagle, "eagle3": eagle3, "mtp": mtp}
# The share of drafted tokens that are accepted, at least. Other methods have random weights, and nearly all that they
# draft is rejected.
ACCEPTED = {"draft_model": 1.0, "eagle": 0.5}
