"""Model shapes, and the cases of a comparison of engines. Weights are random: speed does not depend on them."""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import yaml

from vllm_opset.selection import nearest

FOLDER = Path(__file__).parent
# No engine's KV cache has larger blocks than this many tokens. A request takes whole blocks, and a few are spare.
BLOCK, SPARE_BLOCKS = 128, 8
# The first token ids have special meanings in many vocabularies.
SPECIAL_IDS = 10


@dataclass(frozen=True)
class Case:
    """batch: requests at a time. prompt, output: tokens of each. sampling: of SamplingParams; greedy if it is empty."""

    batch: int
    prompt: int
    output: int
    sampling: Mapping = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.batch}x{self.prompt}/{self.output}{' sampled' if self.sampling else ''}"

    @property
    def length(self) -> int:
        return self.prompt + self.output

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random token ids, which are the same in every run and differ between requests."""
        draw = random.Random(self.name)
        return [draw.choices(range(SPECIAL_IDS, vocab_size), k=self.prompt) for _ in range(self.batch)]


@dataclass(frozen=True)
class Shape:
    """name: for tables. config: a config.json. cases: those that fit into the model's context."""

    name: str
    config: Mapping
    cases: tuple[Case, ...]

    @property
    def dtype(self) -> str:
        return self.config["torch_dtype"]

    def kv_cache_bytes(self, cases: Iterable[Case]) -> int:
        """The size of a KV cache in which no request of these cases waits, and the longest of any case fits."""
        config = self.config
        head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        itemsize = getattr(torch, self.dtype).itemsize
        bytes_per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_size * itemsize
        blocks = [case.batch * _blocks(case.length) for case in cases]
        return bytes_per_token * BLOCK * (max(*blocks, _blocks(self.max_model_len)) + SPARE_BLOCKS)

    @property
    def max_model_len(self) -> int:
        return max(case.length for case in self.cases)


def names() -> list[str]:
    return sorted(file.stem for file in (FOLDER / "models").glob("*.yaml"))


def load(name: str) -> Shape:
    """The shape of that name, in upper or lower case. Raises ValueError, which suggests the nearest name."""
    if name.lower() not in names():
        raise ValueError(f"unknown: {name!r}; {nearest(name.lower(), names())}")
    shape = yaml.safe_load((FOLDER / "models" / f"{name.lower()}.yaml").read_text())
    cases = [Case(**case) for case in yaml.safe_load((FOLDER / "cases.yaml").read_text())[shape["cases"]]]
    longest = shape["config"]["max_position_embeddings"]
    return Shape(shape["name"], shape["config"], tuple(case for case in cases if case.length <= longest))


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)
