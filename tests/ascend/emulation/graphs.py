"""The operators that torch_npu calls when a graph gets new lengths, so that the results stay in the same memory."""

import torch

_library = torch.library.Library("npu", "IMPL")


def get_max_workspace(query, key, value, **options) -> torch.Tensor:
    """The device memory that the operator needs; the emulation needs none."""
    return torch.empty(1, dtype=torch.uint8)


def into(query, key, value, *, workspace, out, **options) -> tuple[torch.Tensor, ...]:
    """The operator itself, writing into existing memory. No caller asks for the log-sum-exp."""
    attended, _ = torch.ops.npu.npu_fused_infer_attention_score(query, key, value, **options)
    out[0].copy_(attended)
    return tuple(out)


CAPTURED = {
    "npu::_npu_fused_infer_attention_score_get_max_workspace": get_max_workspace,
    "npu::npu_fused_infer_attention_score.out": into,
}
for _name, _run in CAPTURED.items():
    _library.impl(_name.removeprefix("npu::"), _run, "CPU")
