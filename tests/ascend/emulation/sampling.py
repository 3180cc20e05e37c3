"""npu_top_k_top_p, step by step as its documentation describes it."""

import torch

from emulation.registry import documented, emulates, require


@emulates("npu::npu_top_k_top_p", meta_wants=3)
def npu_top_k_top_p(logits, p=None, k=None):
    check(logits, p, k)
    ordered, order = logits.float().sort(dim=-1, stable=True)
    if k is not None:
        threshold = ordered.gather(1, (logits.shape[1] - k.long()).unsqueeze(1))
        ordered = ordered.masked_fill(ordered < threshold, -torch.inf)
    if p is not None:
        mass = ordered.softmax(dim=-1).cumsum(dim=-1)
        drop = mass <= 1 - p.float().unsqueeze(1)
        drop[:, -1:] = False
        ordered = ordered.masked_fill(drop, -torch.inf)
    return torch.empty_like(ordered).scatter_(1, order, ordered).to(logits.dtype)


def check(logits: torch.Tensor, p: torch.Tensor | None, k: torch.Tensor | None) -> None:
    require(logits.dim() == 2, "logits are two-dimensional")
    require(p is not None or k is not None, "one of p and k must be given")
    if p is not None:
        require(p.dtype == logits.dtype and p.shape == logits.shape[:1], "p is [rows], of logits' dtype")
        require(bool(((p >= 0) & (p <= 1)).all()), "p lies in 0 … 1")
    if k is not None:
        require(k.dtype == torch.int32 and k.shape == logits.shape[:1], "k is int32 [rows]")
        most = min(documented.TOP_K_MAX, logits.shape[1])
        require(bool(((k >= 1) & (k <= most)).all()), f"k lies in 1 … {documented.TOP_K_MAX}, and in the vocabulary")
