"""Random problems of top_k_top_p_sample: vocabularies of models, and settings that keep few tokens and many."""

import random

import torch

from vllm_opset.ops import _draws, _samples
from vllm_opset.ops.contract import Sample

# Which filters rows have. `unfiltered` rows have a temperature alone.
TOP_K, TOP_P, BOTH, UNFILTERED = KINDS = ("top-k", "top-p", "both", "unfiltered")
VOCABULARIES = {"cuda": (32_000, 128_256, 151_936, 201_088, 262_144), "cpu": (997, 4_096, 5_003)}
ROWS = {"cuda": 256, "cpu": 8}
TOP_KS = (1, 1_000)
TOP_PS = (0.3, 0.99)
TEMPERATURES = (0.3, 3.0)  # a top-p of 0.9 keeps some tens of 151,936 tokens at 0.3, and 61 % of them at 3
STDS = (1.0, 6.0)  # of the logits


def draw(device: str, dtype: torch.dtype, choices: random.Random) -> Sample:
    """The logits of a step, whose rows have the same settings. The first word of its name is the kind of filters."""
    sizes = "cpu" if device == "cpu" else "cuda"
    kind, vocab_size = choices.choice(KINDS), choices.choice(VOCABULARIES[sizes])
    num_rows = _draws.log_uniform(choices, 1, ROWS[sizes])
    std, settings = choices.uniform(*STDS), {"temperature": choices.uniform(*TEMPERATURES)}
    if kind in (TOP_K, BOTH):
        settings["top_k"] = _draws.log_uniform(choices, *TOP_KS)
    if kind in (TOP_P, BOTH):
        settings["top_p"] = choices.uniform(*TOP_PS)
    values = ", ".join(f"{name} {value:.4g}" for name, value in settings.items())
    name = f"{kind} B{num_rows} V{vocab_size} ({values}, std {std:.3g})"

    def make() -> tuple[tuple, dict]:
        rng = _samples.generator(name, device)
        logits = _samples.normal((num_rows, vocab_size), dtype, device, rng, std)
        keys = torch.randint(2**62, (num_rows,), generator=rng, device=device)
        dtypes = {"top_k": torch.int32}
        rows = {
            key: torch.full((num_rows,), value, dtype=dtypes.get(key, torch.float32), device=device)
            for key, value in settings.items()
        }
        return (logits, keys), rows

    return Sample(name, make)
