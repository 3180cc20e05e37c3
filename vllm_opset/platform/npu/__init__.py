"""vLLM on Ascend NPUs, by torch_npu. Not run on Ascend hardware yet: see docs/ascend.md."""
