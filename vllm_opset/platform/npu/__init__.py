"""vLLM on Ascend NPUs, by torch_npu. It has not run on Ascend hardware yet: see docs/ascend.md."""
