"""Model shapes, and the cases of a comparison of engines. Weights are random: speed does not depend on them."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import yaml

from vllm_opset.bench import cases
from vllm_opset.bench.cases import ArrivingTrace, Case, Trace
from vllm_opset.overrides import nearest

FOLDER = Path(__file__).parent
# No engine's KV cache has larger blocks than this many tokens. A request takes whole blocks, and a few are spare.
BLOCK, SPARE_BLOCKS = 128, 8


@dataclass(frozen=True)
class Shape:
    """name: for tables. config: a config.json. cases: those that fit into the model's context."""

    name: str
    config: Mapping
    cases: tuple[Case, ...]

    @property
    def dtype(self) -> str:
        return self.config["torch_dtype"]

    @property
    def text_config(self) -> Mapping:
        """The config of a multimodal model's language model; of other models, the whole config."""
        return self.config.get("text_config", self.config)

    def arriving(self, rate: float, requests: int) -> ArrivingTrace:
        """A case of requests with the lengths of this model's trace, which arrive at so many per second.

        Raises ValueError if the context is too short for that trace, and for a rate or a number that cannot be.
        """
        trace = next((case for case in self.cases if isinstance(case, Trace)), None)
        if trace is None:
            raise ValueError(f"{self.name}'s context is too short for the requests of a trace")
        return ArrivingTrace(requests, trace.prompt, trace.output, rate)

    def kv_cache_bytes(self, cases: Iterable[Case]) -> int:
        """The size of a KV cache for all requests that one of these cases has at once, and for the longest of any.

        It counts every layer as one with such a cache, also those with linear attention.
        """
        config = self.text_config
        head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        itemsize = getattr(torch, self.dtype).itemsize
        bytes_per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_size * itemsize
        blocks = [sum(map(_blocks, case.lengths_at_once())) for case in cases]
        return bytes_per_token * BLOCK * (max([*blocks, _blocks(self.max_model_len)]) + SPARE_BLOCKS)

    @property
    def max_model_len(self) -> int:
        return max(case.length for case in self.cases)


def names() -> list[str]:
    return sorted(file.stem for file in (FOLDER / "models").glob("*.yaml"))


def load(name: str) -> Shape:
    """The shape of that name, in upper or lower case. Raises ValueError, which suggests the nearest name."""
    if name.lower() not in names():
        raise ValueError(f"unknown: {name!r}; {nearest(name.lower(), names())}")
    read = _read(name.lower())
    shape = Shape(read["name"], read["config"], cases.load(read["cases"]))
    longest = shape.text_config["max_position_embeddings"]
    return replace(shape, cases=tuple(case for case in shape.cases if case.length <= longest))


def with_draft(args: Mapping, folder: Path) -> Mapping:
    """Arguments of `LLM` in which a shape that drafts is named by the folder of its config.json, below `folder`."""
    speculative = args.get("speculative_config") or {}
    name = str(speculative.get("model")).lower()
    if name not in names():
        return args
    draft = folder / name
    draft.mkdir(exist_ok=True)
    (draft / "config.json").write_text(json.dumps(load(name).config))
    return {**args, "speculative_config": {**speculative, "model": str(draft)}}


def _read(name: str) -> dict:
    """A file of `models`. One that names a base has only what differs from the base."""
    shape = yaml.safe_load((FOLDER / "models" / f"{name}.yaml").read_text())
    if "base" not in shape:
        return shape
    base = _read(shape["base"])
    return base | shape | {"config": base["config"] | shape["config"]}


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)
