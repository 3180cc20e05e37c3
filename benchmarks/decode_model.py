"""A decode step of a dense model's layers, as calls of the Triton kernels: `decode_layers.py` times it.

It has the kernels that an engine runs between the embedding and the last norm, in their order. Weights, KV caches and
hidden states are random.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from vllm_opset.kernel import kernels_of
from vllm_opset.ops.attention.paged_batch import PagedBatch

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
    if "quantization_config" in config:
        return f"its weights are quantised ({config['quantization_config']['quant_method']})"
    return None if architecture in ARCHITECTURES else f"{architecture} is none of {', '.join(ARCHITECTURES)}"


def run(op: str, *args, **kwargs) -> torch.Tensor | None:
    return kernels_of(op)["triton"].run(*args, **kwargs)


class Layer:
    """The weights of a layer of one of ARCHITECTURES, and its kernels."""

    def __init__(self, config: Mapping, draw: Draw) -> None:
        architecture, hidden, width = config["architectures"][0], config["hidden_size"], config["intermediate_size"]
        self.num_heads, self.num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_size = config.get("head_dim") or hidden // self.num_heads
        self.epsilon, self.gemma = config["rms_norm_eps"], architecture == "Gemma2ForCausalLM"
        self.scale = config.get("query_pre_attn_scalar", self.head_size) ** -0.5
        self.soft_cap = config.get("attn_logit_softcapping", 0.0)
        attended, qkv = self.num_heads * self.head_size, (self.num_heads + 2 * self.num_kv_heads) * self.head_size
        sizes = (qkv, hidden), (hidden, attended), (2 * width, hidden), (hidden, width)
        self.qkv, self.o, self.gate_up, self.down = (draw(*size, std=size[1] ** -0.5) for size in sizes)
        self.bias = draw(qkv, std=0.1) if architecture == "Qwen2ForCausalLM" else None
        self.norms = [draw(hidden, std=0.1, mean=0.0 if self.gemma else 1.0) for _ in range(4)]
        normed = ("query", "key") if architecture == "Qwen3ForCausalLM" else ()
        self.head_norms = [draw(self.head_size, std=0.1, mean=1.0) for _ in normed]

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in (self.qkv, self.o, self.gate_up, self.down))

    def attend(
        self, x: torch.Tensor, residual: torch.Tensor, inputs: "Inputs", batch: PagedBatch, kv_cache, window: int | None
    ) -> torch.Tensor:
        """Everything before the o projection. x, residual: change in place."""
        self._add_and_norm(x, residual, 0)
        qkv = run("linear", x, self.qkv, self.bias).unflatten(1, (-1, self.head_size))
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
        x = self._norm_of_gemma(run("linear", attended, self.o), 1)
        self._add_and_norm(x, residual, 2)
        gate_up = run("linear", x, self.gate_up)
        x = run("gelu_and_mul", gate_up, "tanh") if self.gemma else run("silu_and_mul", gate_up)
        return self._norm_of_gemma(run("linear", x, self.down), 3)

    def _add_and_norm(self, x: torch.Tensor, residual: torch.Tensor, number: int) -> None:
        run("fused_add_rms_norm", x, residual, self.norms[number], self.epsilon, float(self.gemma))

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
        self._inputs = Inputs(step, first.head_size, dtype, device)
        cache_size = self._inputs.num_blocks, first.num_kv_heads, BLOCK_SIZE, 2 * first.head_size
        fitting = max(1, int(MAX_KV_CACHE_BYTES / (math.prod(cache_size) * dtype.itemsize)))
        # With this deviation some scores are far above the others. So an output without one of their keys is another.
        self._kv_caches = [draw(*cache_size, std=3.0) for _ in range(min(at_most or fitting, self.num_layers))]
        self._hidden = draw(step.num_reqs, config["hidden_size"])

    def forward(self, num_layers: int) -> torch.Tensor:
        """Calls the kernels of so many layers. Returns attention's output in the first one."""
        x, residual, batch, outputs = self._hidden.clone(), self._hidden.clone(), self._inputs.batch(), []
        for number in range(num_layers):
            layer = self.layers[number % len(self.layers)]
            kv_cache = self._kv_caches[number % len(self._kv_caches)]
            window = None if layer.gemma and number % 2 else self._window  # every other layer of Gemma 2 has one
            outputs.append(layer.attend(x, residual, self._inputs, batch, kv_cache, window))
            x = layer.finish(outputs[-1], residual)
        return outputs[0]
