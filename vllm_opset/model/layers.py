"""opset's versions of vLLM's layers.

Each class comes before a layer of vLLM's among the bases of the class that replaces it (`registration`). If the op's
contract does not cover a case, vLLM's own code runs. Otherwise the layer calls the chosen kernel with as little Python
in between as possible.
"""

from collections.abc import Callable, Sequence

import torch

from vllm_opset import operators, ops, selection
from vllm_opset.ops.contract import Op
from vllm_opset.unsupported import Refusal


class Kernels(dict[torch.dtype, Callable]):
    """A layer's kernels for one op, by the dtype of the activations.

    The first call in a dtype chooses the kernel for it; later calls look it up. The first call raises OverrideError if
    the user's kernel does not support the dtype. A model that torch.compile compiles gets the kernel's operator. If it
    is traced before that first call, each call of the operator chooses.
    """

    def __init__(self, op: Op, known: Callable[[], dict], compiled: bool) -> None:
        """known: returns the fields of the op's problem that the layer knows; it is called for each choice."""
        super().__init__()
        self.op, self.known, self.compiled = op, known, compiled

    def __missing__(self, dtype: torch.dtype) -> Callable:
        if torch.compiler.is_compiling():
            return operators.choosing(self.op)
        from vllm.platforms import current_platform

        problem = self.op.problem(device=current_platform.device_type, dtype=dtype, **self.known())
        choice = selection.select(self.op, problem)
        self[dtype] = operators.of(choice) if self.compiled else choice.run
        return self[dtype]


class OpsetLayer:
    """A mixin that comes before a vLLM layer among the bases.

    Kernels are chosen when the layer is built, and again when a model that holds it was loaded. The second choice is
    needed because vLLM shares some layers between the engines of a process.
    """

    opset_kernels: Sequence[Kernels] = ()
    # Whether the kernels are chosen when the layer is built, so that the report at start-up names them.
    opset_chooses_when_built = True

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.bind(torch.get_default_dtype())

    def _apply(self, *args, **kwargs) -> torch.nn.Module:
        """Forget the chosen kernels: nn.Module calls this for `.to()`, `.half()` etc., which change weights' dtype."""
        super()._apply(*args, **kwargs)
        for kernels in self.opset_kernels:
            kernels.clear()
        return self

    def bind(self, dtype: torch.dtype) -> None:
        """Make the chosen kernels this layer's forward, under vLLM's current config. dtype: of the activations."""
        from vllm.config import CompilationMode, get_current_vllm_config

        mode = get_current_vllm_config().compilation_config.mode
        self.opset_is_compiled = mode not in (None, CompilationMode.NONE)
        # False if the user or a compiler has switched the layer off (`custom_ops=["-rms_norm"]`).
        self.opset_is_wanted = (self._enforce_enable or self.enabled()) and self.covered_by_contract()
        self.opset_kernels = []
        self._forward_method = self.use_kernels() if self.opset_is_wanted else self.forward_native
        for kernels in self.opset_kernels if self.opset_chooses_when_built else ():
            kernels[dtype]
        # nn.Module calls `forward`. vLLM's own `forward` would only pass the call on.
        self.forward = self._forward_method

    def covered_by_contract(self) -> bool:
        """Whether the op's contract can express this layer; if not, vLLM's own code runs."""
        return True

    def use_kernels(self) -> Callable:
        """The function to run as this layer's forward. It declares by `kernels_for` the ops that it calls."""
        raise NotImplementedError

    def kernels_for(self, op: Op, known: Callable[[], dict] = dict) -> Kernels:
        """The kernels of an op that this layer calls. known: see `Kernels`."""
        kernels = Kernels(op, known, self.opset_is_compiled)
        self.opset_kernels.append(kernels)
        return kernels


class RMSNormLayer(OpsetLayer):
    """Layer for RMSNorm and GemmaRMSNorm, which differ in the offset that is added to the weight."""

    weight_offset = 0.0

    def covered_by_contract(self) -> bool:
        return getattr(self, "variance_size_override", None) is None

    def use_kernels(self) -> Callable:
        self._norm = self.kernels_for(ops.rms_norm, self._known)
        self._add_and_norm = self.kernels_for(ops.fused_add_rms_norm, self._known)
        return self.forward_oot

    def _known(self) -> dict:
        return {"hidden_size": len(self.weight), "weight_dtype": _dtype(self._parameters.get("weight"))}

    def forward_oot(self, x: torch.Tensor, residual: torch.Tensor | None = None):
        # Not self.weight: nn.Module looks up parameters by the slow `__getattr__`.
        weight = self._parameters.get("weight")
        if residual is None:
            return self._norm[x.dtype](x, weight, self.variance_epsilon, self.weight_offset)
        self._add_and_norm[x.dtype](x, residual, weight, self.variance_epsilon, self.weight_offset)
        return x, residual


class GemmaRMSNormLayer(RMSNormLayer):
    weight_offset = 1.0


class LayerNormLayer(OpsetLayer):
    def use_kernels(self) -> Callable:
        self._norm = self.kernels_for(ops.layer_norm, self._known)
        return self.forward_oot

    def _known(self) -> dict:
        return {"hidden_size": self.normalized_shape[0], "weight_dtype": _dtype(self.weight)}

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm[x.dtype](x, self._parameters.get("weight"), self._parameters.get("bias"), self.eps)


class RMSNormGatedLayer(OpsetLayer):
    def use_kernels(self) -> Callable:
        self._norm = self.kernels_for(ops.rms_norm_gated, self._known)
        return self.forward_oot

    def _known(self) -> dict:
        size = len(self.weight)
        return {"hidden_size": size, "group_size": self.group_size or size, "weight_dtype": self.weight.dtype}

    def forward_oot(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        weight, norm = self._parameters["weight"], self._norm[x.dtype]
        return norm(x, z, weight, self.eps, self.group_size, self.norm_before_gate, self.activation)


class ApplyRotaryEmbLayer(OpsetLayer):
    """Layer for cosines and sines that were gathered before. It computes in fp32, whether or not vLLM's layer would.

    Every rotary embedding of vLLM holds such a layer, and RotaryEmbeddingLayer does not call it. So its kernel is
    chosen at the first call.
    """

    opset_chooses_when_built = False

    def use_kernels(self) -> Callable:
        self._rotate = self.kernels_for(ops.apply_rotary_emb, lambda: {"is_neox_style": self.is_neox_style})
        return self.forward_oot

    def forward_oot(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return self._rotate[x.dtype](x, cos, sin, self.is_neox_style)


class GeluAndMulSparseLayer(OpsetLayer):
    def use_kernels(self) -> Callable:
        self._activate = self.kernels_for(ops.gelu_and_mul_sparse)
        self._std_multiplier = float(self.std_multiplier)  # up to 0.28 it is a tensor
        return self.forward_oot

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return self._activate[x.dtype](x, self._std_multiplier, self.approximate)


class RotaryEmbeddingLayer(OpsetLayer):
    """Layer for all rotary embeddings that differ only in how they compute their table of cosines and sines."""

    def use_kernels(self) -> Callable:
        self._rotate = self.kernels_for(ops.rotary_embedding, self._known)
        return self.forward_oot

    def _known(self) -> dict:
        return {
            "head_size": self.head_size,
            "rotary_dim": self.rotary_dim,
            "is_neox_style": self.is_neox_style,
            "table_dtype": self.cos_sin_cache.dtype,
        }

    def forward_oot(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None):
        """positions: [num_tokens] or [batch, seq_len]. query, key: one row of all heads per position, in any shape."""
        if positions.ndim != 1:
            return self._rotate_sequences(positions, query, key)
        table = self._buffers["cos_sin_cache"]
        self._rotate[query.dtype](positions, query, key, self.head_size, table, self.is_neox_style)
        return query, key

    def _rotate_sequences(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None):
        """Rotate like vLLM's layer, with all sequences in one dimension. A layout without such a view is copied."""
        by_head = (None if x is None else x.reshape(positions.numel(), -1, self.head_size) for x in (query, key))
        rotated = self.forward_oot(positions.flatten(), *by_head)
        return tuple(None if x is None else x.reshape_as(given) for x, given in zip(rotated, (query, key), strict=True))


class MRotaryEmbeddingLayer(RotaryEmbeddingLayer):
    """Layer for multimodal models. A position has three components, each of which rotates a section of the pairs."""

    def forward_oot(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None, offsets=None):
        if positions.ndim == 1:
            return super().forward_oot(positions, query, key)
        table = torch.cat([self._by_section(half) for half in self.cos_sin_cache[positions].chunk(2, dim=-1)], dim=-1)
        rows = torch.arange(len(table), device=table.device)
        self._rotate[query.dtype](rows, query, key, self.head_size, table, self.is_neox_style)
        return query, key

    def _by_section(self, half: torch.Tensor) -> torch.Tensor:
        """[3, num_tokens, rotary_dim // 2] -> [num_tokens, rotary_dim // 2]"""
        if self.mrope_interleaved:
            from vllm.model_executor.layers.rotary_embedding.mrope import apply_interleaved_rope

            return apply_interleaved_rope(half, self.mrope_section)
        sections = half.split(self.mrope_section, dim=-1)
        return torch.cat([section[i] for i, section in enumerate(sections)], dim=-1)


def activation(op: Op, **attributes: str) -> type[OpsetLayer]:
    """A layer class for an activation. attributes: maps further arguments of the op to attributes of vLLM's layer."""

    class ActivationLayer(OpsetLayer):
        def use_kernels(self) -> Callable:
            kernels = self.kernels_for(op)
            arguments = {argument: getattr(self, name) for argument, name in attributes.items()}
            return lambda x: kernels[x.dtype](x, **arguments)

        def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
            """Only tells vLLM that the layer is enabled; it calls the function of `use_kernels` instead."""
            return self._forward_method(x)

    return ActivationLayer


def bind(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Choose kernels again for a model that was just loaded, because its layers may be older than this engine.

    It must run under vLLM's current config.
    """
    for module in model.modules():
        if isinstance(module, OpsetLayer):
            module.bind(dtype)


def check_positions(model: torch.nn.Module, max_model_len: int) -> None:
    """Raise Refusal if a rotary embedding of a model's attention has no row for some position of a request.

    A kernel would raise for the first request of such a length and end the engine, or read memory behind the table.
    """
    from vllm.model_executor.layers.attention import Attention

    for module in model.modules():
        rotary = getattr(module, "rotary_emb", None)
        # A derived class may find its rows by other numbers than positions.
        is_plain = getattr(type(rotary), "forward_oot", None) is RotaryEmbeddingLayer.forward_oot
        if not is_plain or not isinstance(getattr(module, "attn", None), Attention):
            continue
        rows = len(rotary.cos_sin_cache)
        if rows < max_model_len:
            raise Refusal(
                f"vllm-opset does not support requests of {max_model_len} tokens where a model's rotary embedding has "
                f"{rows} positions: give --max-model-len {rows}, or a longer embedding by --hf-overrides."
            )


def _dtype(tensor: torch.Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype
