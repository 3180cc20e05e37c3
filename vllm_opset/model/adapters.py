"""Adapters (LoRA) on a CPU: the low-rank products that vLLM's layers with adapters add to those of the model's weights.

vLLM's own functions for a CPU copy an adapter's matrices for every token, and up to 0.32 they add the last adapter's
product to tokens that have none. Here, the tokens of an adapter are multiplied together.
"""

from collections.abc import Sequence

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

# The rows of an adapter in a step: its slot in the stacked matrices of a layer, and the numbers of the rows.
Rows = Sequence[tuple[int, torch.Tensor]]


class OpsetPunicaWrapper(PunicaWrapperCPU):
    """Knows the adapter of each row of a step, and computes the products for all layers of a model."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._of_tokens: Rows = ()
        self._of_samples: Rows = ()

    def update_metadata(self, *args, **kwargs) -> None:
        super().update_metadata(*args, **kwargs)
        self._of_tokens, self._of_samples = _by_slot(self.token_lora_indices), _by_slot(self.sampler_indices)

    def add_lora_linear(self, *args, **kwargs) -> None:
        if self._of_tokens:  # otherwise vLLM would fill buffers with zeros, for each layer
            super().add_lora_linear(*args, **kwargs)

    def _apply_shrink(self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, scale: float) -> None:
        _add_products(y, x, w_t_all, self._of_tokens, scale)

    def _apply_expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        w_t_all: torch.Tensor,
        y_offset: int,
        y_slice_size: int,
        add_inputs: bool = True,
    ) -> None:
        _add_products(y[:, y_offset : y_offset + y_slice_size], x, w_t_all, self._of_tokens)

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True, **kwargs
    ) -> None:
        _add_products(y, x, lora_b_stacked, self._of_tokens)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        **kwargs,
    ) -> None:
        rows = self._of_logits(x, lora_b_stacked)
        buffer = x.new_zeros(len(x), lora_a_stacked.shape[-2], dtype=torch.float32)
        _add_products(buffer, x, lora_a_stacked, rows, scale)
        _add_products(y, buffer, lora_b_stacked, rows)

    def _of_logits(self, x: torch.Tensor, lora_b_stacked: torch.Tensor) -> Rows:
        """The adapters of the hidden states of which logits are computed, x: [num_rows, hidden_size].

        vLLM does not say which tokens these are. To sample, it copies the last token of each request. For the
        log-probabilities of prompts, it takes a slice of the hidden states of all tokens, whose offset tells the first
        token. If both have as many rows, each request has one token, and both mean the same.

        Raises RuntimeError for a model that changes the slice before it comes here, if an adapter changes its LM head.
        """
        tokens = self.token_lora_indices
        if x.untyped_storage().nbytes() == len(tokens) * x.shape[1] * x.element_size():
            first = x.storage_offset() // x.shape[1]
            return _by_slot(tokens[first : first + len(x)])
        if len(x) == len(self.sampler_indices):
            return self._of_samples
        if lora_b_stacked.any():
            raise RuntimeError(
                "vllm-opset cannot tell the adapters of these logits: leave out prompt_logprobs, or give "
                "--lora-target-modules without lm_head."
            )
        return ()


def _by_slot(slots: torch.Tensor) -> Rows:
    """slots: of each row, -1 without an adapter."""
    return [(slot, torch.nonzero(slots == slot)[:, 0]) for slot in slots.unique().tolist() if slot >= 0]


def _add_products(y: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, rows: Rows, scale: float = 1.0) -> None:
    """Add scale · x · weightsᵀ to the first columns of y, in fp32.

    y: [num_rows, at least out_features]. x: [num_rows, in_features]. weights: [slots, 1, out_features, in_features].
    """
    for slot, numbers in rows:
        weight = weights[slot, 0].float()
        y[numbers, : len(weight)] += scale * (x[numbers].float() @ weight.T)


def take_memory(manager) -> None:
    """Write zeros to all matrices of vLLM's LoRAModelManager: Linux gives them memory only once they are written."""
    for layer in manager.modules.values():
        for slot in range(manager.lora_slots):
            layer.reset_lora(slot)
