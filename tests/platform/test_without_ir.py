"""A vLLM without its IR, which it removes after 0.33, gets opset's norms all the same."""

import sys

import pytest
import torch
import vllm
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.platforms.interface import Platform

from vllm_opset.model.layers import OpsetLayer
from vllm_opset.platform.differences import BRIDGES

pytestmark = pytest.mark.window


def test_norms_need_no_ir(monkeypatch):
    config = VllmConfig()
    for name in [name for name in sys.modules if name == "vllm.ir" or name.startswith("vllm.ir.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delattr(vllm, "ir", raising=False)
    for hook in ("import_ir_kernels", "get_default_ir_op_priority"):
        monkeypatch.delattr(Platform, hook, raising=False)
    (bridge,) = (bridge for bridge in BRIDGES if bridge.name == "IR ops")
    assert not bridge.needed()
    with set_current_vllm_config(config):
        layer = RMSNorm(48, eps=1e-5)
    assert isinstance(layer, OpsetLayer)
    x, residual = torch.randn(5, 48), torch.randn(5, 48)
    torch.testing.assert_close(layer(x), torch.nn.functional.rms_norm(x, (48,), eps=1e-5))
    added = x + residual
    normed, residual = layer(x, residual)
    torch.testing.assert_close(residual, added)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(added, (48,), eps=1e-5))
