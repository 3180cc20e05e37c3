"""Serve and ask: a client of `vllm serve`, over HTTP, with streaming. Start the server first:

vllm serve examples/tiny-qwen3 --dtype float32 --max-model-len 512 --kv-cache-memory-bytes 64M --served-model-name tiny
python examples/ask.py "Write plugin backwards."
"""

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a served model one question.")
    parser.add_argument("question")
    parser.add_argument("--url", default="http://localhost:8000/v1")
    arguments = parser.parse_args()
    client = OpenAI(base_url=arguments.url, api_key="none")
    messages = [{"role": "user", "content": arguments.question}]
    stream = client.chat.completions.create(model="tiny", messages=messages, temperature=0, stream=True)
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
