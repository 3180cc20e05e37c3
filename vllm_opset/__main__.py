"""The module form of the command: `python -m vllm_opset` runs `vllm-opset`."""

from vllm_opset.cli import main

if __name__ == "__main__":
    main()
