"""Offline generation: `LLM.generate` with this plugin installed. Nothing here is special to it."""

from pathlib import Path

from vllm import LLM, SamplingParams

MODEL = Path(__file__).parent / "tiny-qwen3"
PROMPTS = ["reverse: plugin =", "add: 12 + 34 =", "upper: kernel =", "sort: 90210 ="]


def main() -> None:
    llm = LLM(model=str(MODEL), dtype="float32", max_model_len=512, kv_cache_memory_bytes=64 << 20)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=32))
    for output in outputs:
        print(output.prompt, output.outputs[0].text.strip())


if __name__ == "__main__":
    main()
