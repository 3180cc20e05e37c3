"""A decode step of a dense model's layers, as calls of the Triton kernels: `decode_layers.py` times it.

It has the kernels that an engine runs between the embedding and the last norm, in their order. Weights, KV caches and
hidden states are random. Weights are in the model's dtype, or in fp8 by blocks or by channels.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from vllm_opset.kernel import kernels_of
from vllm_opset.ops.attention.paged_batch import PagedBatch
from vllm_opset.ops.schemes import FP8, PER_ROW, GroupShape

ARCHITECTURES = ("Gemma2ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
BLOCK_SIZE = 16
# The L2 cache, which has 60 MB on an H200, must not hold the weights of a layer until the next replay.
MIN_WEIGHTS, MIN_WEIGHT_BYTES = 6, 250e6
MAX_KV_CACHE_BYTES = 20e9  # of all layers; if they need more, they share caches

Draw = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Step:
    """A decode step. text: as on the command line. config: the model's config.json. context: keys of each request."""

    text: str
    config: Mapping
    num_reqs: int
    context: int
    max_model_len: int


def why_unknown(config: Mapping) -> str | None:
    """Why the layers of a model are not known here, or None."""
    architecture = config["architectures"][0]
    if "quantization_config" in config and groups_of(config) is None:
        method = config["quantization_config"]["quant_method"]
        return f"its weights are quantised ({method}), and not in fp8 by blocks or by channels"
    if architecture not in ARCHITECTURES:
        return f"{architecture} is none of {', '.join(ARCHITECTURES)}"
    in_fp8 = architecture == "Gemma2ForCausalLM" and groups_of(config) is not None
    return "layers of Gemma 2 are known unquantised only" if in_fp8 else None


class Groups(NamedTuple):
    """The values of an fp8 weight that share a scale, and those of its input, which is quantised in each step."""

    weight: GroupShape
    x: GroupShape


def groups_of(config: Mapping) -> Groups | None:
    """Those of a model whose weights are all in fp8, by blocks or by channels. None for any other model."""
    stored = config.get("quantization_config", {})
    if stored.get("quant_method") == "fp8" and "weight_block_size" in stored:
        block = GroupShape(*stored["weight_block_size"])
        return Groups(block, GroupShape(1, block.columns))
    weights = [group["weights"]["strategy"] for group in stored.get("config_groups", {}).values()]
    by_channels = stored.get("format") == "float-quantized" and weights == ["channel"]
    return Groups(PER_ROW, PER_ROW) if by_channels else None


class Weight(NamedTuple):
    """scale: of values in fp8."""

    values: torch.Tensor
    scale: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.scale is None else self.scale.nbytes)


# The input of a product: in the model's dtype without scales, or in fp8 with them.
Input = tuple[torch.Tensor, torch.Tensor | None]


def run(op: str, *args, **kwargs) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
    return kernels_of(op)["triton"].run(*args, **kwargs)


def without(ops: Collection[str], results: dict[tuple, object]) -> Callable:
    """Like `run`, but it calls a kernel of these ops only the first time that its tensors have their shapes.

    Later it returns the first result. So what follows computes on right shapes and finite values. results: what was
    returned. A graph that was captured reads it, so it must live as long.
    """
    call = run  # itself, since `run` may be replaced by what is made here

    def run_or_remember(op: str, *args, **kwargs):
        if op not in ops:
            return call(op, *args, **kwargs)
        key = op, *(arg.shape for arg in args if isinstance(arg, torch.Tensor))
        if key not in results:
            results[key] = call(op, *args, **kwargs)
        return results[key]

    return run_or_remember


class Layer:
    """The weights of a layer of one of ARCHITECTURES, and its kernels."""

    def __init__(self, config: Mapping, draw: Draw) -> None:
        architecture, hidden, width = config["architectures"][0], config["hidden_size"], config["intermediate_size"]
        self.groups = groups_of(config)
        self.num_heads, self.num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_size = config.get("head_dim") or hidden // self.num_heads
        self.epsilon, self.gemma = config["rms_norm_eps"], architecture == "Gemma2ForCausalLM"
        self.scale = config.get("query_pre_attn_scalar", self.head_size) ** -0.5
        self.soft_cap = config.get("attn_logit_softcapping", 0.0)
        attended, qkv = self.num_heads * self.head_size, (self.num_heads + 2 * self.num_kv_heads) * self.head_size
        sizes = (qkv, hidden), (hidden, attended), (2 * width, hidden), (hidden, width)
        self.weights = self.qkv, self.o, self.gate_up, self.down = [self._weight(*size, draw) for size in sizes]
        self.bias = draw(qkv, std=0.1) if architecture == "Qwen2ForCausalLM" else None
        self.norms = [draw(hidden, std=0.1, mean=0.0 if self.gemma else 1.0) for _ in range(4)]
        normed = ("query", "key") if architecture == "Qwen3ForCausalLM" else ()
        self.head_norms = [draw(self.head_size, std=0.1, mean=1.0) for _ in normed]

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    def attend(
        self, x: torch.Tensor, residual: torch.Tensor, inputs: "Inputs", batch: PagedBatch, kv_cache, window: int | None
    ) -> torch.Tensor:
        """Everything before the o projection. x, residual: change in place."""
        qkv = self._multiply(self._add_and_norm(x, residual, 0), self.qkv, self.bias).unflatten(1, (-1, self.head_size))
        query, key, value = qkv.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], 1)
        rest = inputs.positions, inputs.cos_sin_cache, True, kv_cache, inputs.slot_mapping
        if self.head_norms:
            run("qk_norm_rope_cache", query, key, value, *self.head_norms, self.epsilon, *rest)
        else:
            run("rope_cache", query, key, value, *rest)
        out = query.new_empty(query.shape)
        options = {"scale": self.scale, "window": window, "soft_cap": self.soft_cap}
        run("paged_attention", query, kv_cache, batch, out, **options)
        return out.flatten(1)

    def finish(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The o projection and the MLP. residual: changes in place."""
        groups = self.groups
        quantised = (attended, None) if groups is None else run("quantise", attended, FP8, list(groups.x))
        x = self._norm_of_gemma(self._multiply(quantised, self.o), 1)
        gate_up = self._multiply(self._add_and_norm(x, residual, 2), self.gate_up)
        return self._norm_of_gemma(self._multiply(self._activation(gate_up), self.down), 3)

    def _activation(self, gate_up: torch.Tensor) -> Input:
        if self.groups is not None:
            return run("silu_and_mul_quant", gate_up, FP8, list(self.groups.x))
        return run("gelu_and_mul", gate_up, "tanh") if self.gemma else run("silu_and_mul", gate_up), None

    def _add_and_norm(self, x: torch.Tensor, residual: torch.Tensor, number: int) -> Input:
        """x: may change in place."""
        norm = self.norms[number], self.epsilon
        if self.groups is not None:
            return run("fused_add_rms_norm_quant", x, residual, *norm, FP8, list(self.groups.x))
        run("fused_add_rms_norm", x, residual, *norm, float(self.gemma))
        return x, None

    def _multiply(self, x: Input, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        if weight.scale is None:
            return run("linear", x[0], weight.values, bias)
        return run("linear", x[0], weight.values, bias, weight.scale, x[1], self.norms[0].dtype)

    def _weight(self, outputs: int, inputs: int, draw: Draw) -> Weight:
        if self.groups is None:
            return Weight(draw(outputs, inputs, std=inputs**-0.5))
        mean = inputs**-0.5
        scale = draw(*self.groups.weight.scale_shape((outputs, inputs)), std=0.1 * mean, mean=mean)
        return Weight(draw(outputs, inputs).to(FP8), scale.float())

    def _norm_of_gemma(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """Gemma 2 normalises the results of attention and of the MLP."""
        return run("rms_norm", x, self.norms[number], self.epsilon, 1.0) if self.gemma else x


class Inputs:
    """The tensors that all layers of a step share. Each request's last token is new."""

    def __init__(self, step: Step, head_size: int, dtype: torch.dtype, device: str) -> None:
        num_reqs, pages = step.num_reqs, math.ceil(step.context / BLOCK_SIZE)
        # Page 0 is vLLM's null page. The rows of the table have a multiple of 16 columns, as with a usual
        # max_model_len. For other strides, Triton compiles other kernels.
        order = 1 + torch.randperm(num_reqs * pages).view(num_reqs, pages)
        table = torch.zeros(num_reqs, 16 * math.ceil(step.max_model_len / (16 * BLOCK_SIZE)), dtype=torch.int32)
        table[:, :pages] = order
        self.num_blocks = 1 + num_reqs * pages
        self.slot_mapping = (order[:, -1] * BLOCK_SIZE + (step.context - 1) % BLOCK_SIZE).to(device)
        self.positions = torch.full((num_reqs,), step.context - 1, device=device)
        frequencies = step.config["rope_theta"] ** -torch.linspace(0, 1, head_size // 2)
        angles = torch.arange(step.max_model_len)[:, None] * frequencies
        self.cos_sin_cache = torch.cat((angles.cos(), angles.sin()), 1).to(device, dtype)
        starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=device)
        self._batch = starts, torch.full_like(starts[1:], step.context), table.to(device), 1, step.max_model_len

    def batch(self) -> PagedBatch:
        """A new one. It keeps what a kernel's plan needs, so graphs of other plans need other batches."""
        return PagedBatch(*self._batch)


class Model:
    """The layers of a model with their KV caches, and a step's inputs.

    at_most: layers with weights and KV caches of their own. None for as many as keep the weights out of a GPU's cache.
    """

    def __init__(self, step: Step, device: str, at_most: int | None = None) -> None:
        torch.manual_seed(0)
        config, dtype = step.config, getattr(torch, step.config["torch_dtype"])

        def draw(*size: int, std: float = 1.0, mean: float = 0.0) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device).normal_(mean, std)

        self.num_layers, self._window = config["num_hidden_layers"], config.get("sliding_window")
        first = Layer(config, draw)
        distinct = at_most or max(MIN_WEIGHTS, math.ceil(MIN_WEIGHT_BYTES / first.nbytes))
        self.layers = [first, *(Layer(config, draw) for _ in range(min(distinct, self.num_layers) - 1))]
        self.inputs = Inputs(step, first.head_size, dtype, device)
        cache_size = self.inputs.num_blocks, first.num_kv_heads, BLOCK_SIZE, 2 * first.head_size
        fitting = max(1, int(MAX_KV_CACHE_BYTES / (math.prod(cache_size) * dtype.itemsize)))
        # With this deviation some scores are far above the others. So an output without one of their keys is another.
        self.kv_caches = [draw(*cache_size, std=3.0) for _ in range(min(at_most or fitting, self.num_layers))]
        self.hidden = draw(step.num_reqs, config["hidden_size"])

    def forward(self, num_layers: int) -> torch.Tensor:
        """Calls the kernels of so many layers. Returns attention's output in the first one."""
        x, residual, batch, outputs = self.hidden.clone(), self.hidden.clone(), self.inputs.batch(), []
        for number in range(num_layers):
            layer = self.layers[number % len(self.layers)]
            kv_cache = self.kv_caches[number % len(self.kv_caches)]
            window = None if layer.gemma and number % 2 else self._window  # every other layer of Gemma 2 has one
            outputs.append(layer.attend(x, residual, self.inputs, batch, kv_cache, window))
            x = layer.finish(outputs[-1], residual)
        return outputs[0]
