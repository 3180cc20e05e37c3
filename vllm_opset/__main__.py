"""`python -m vllm_opset` is `vllm-opset`."""

from vllm_opset.cli import main

if __name__ == "__main__":
    main()
