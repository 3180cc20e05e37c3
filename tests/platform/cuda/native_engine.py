"""Prints as JSON the answers of an engine on a small random model. Its platform and parts come from the environment.

Its argument is JSON: more arguments of LLM, and whether the model has experts.
"""

import json
import sys
import tempfile

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm import LLM, SamplingParams

VOCABULARY = 500
PROMPTS = [[(7 * i * i + 13 * j) % VOCABULARY for i in range(n)] for j, n in enumerate((1, 5, 16, 40, 77, 300))]
EVERYONE = list(range(len(PROMPTS)))
SAMPLED = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}


# Each token has all of the experts, so that no rounding changes the choice.
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "norm_topk_prob": True}


def save_model(folder: str, experts: bool) -> None:
    """Saves the same weights every time, spread so widely that attention shows in the log-probabilities."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe" if experts else "qwen3",
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        initializer_range=0.3,
        **(EXPERTS if experts else {}),
    )
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)


def answers(llm: LLM, order: list[int], sampled: list[int] = EVERYONE, **params) -> list[dict]:
    """The tokens of each prompt and the log-probabilities of the likeliest ones.

    order: the order of the prompts in the batch. sampled: prompts that use these parameters, with seeds of their own.
    All others are greedy.
    """
    asked = [
        SamplingParams(
            max_tokens=16,
            ignore_eos=True,
            logprobs=3,
            detokenize=False,
            seed=index,
            **(params if index in sampled else {"temperature": 0.0}),
        )
        for index in order
    ]
    outputs = llm.generate([{"prompt_token_ids": PROMPTS[i]} for i in order], asked, use_tqdm=False)
    found = {
        index: {
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [{str(t): p.logprob for t, p in step.items()} for step in output.outputs[0].logprobs],
        }
        for index, output in zip(order, outputs, strict=True)
    }
    return [found[index] for index in sorted(found)]


def main(experts: bool = False, **arguments) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, experts)
        llm = LLM(
            folder,
            skip_tokenizer_init=True,
            max_model_len=512,
            max_num_seqs=16,
            # While this engine measures free memory, other engines may start and stop on this GPU.
            gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=1 << 30,
            **arguments,
        )
    found = {
        "greedy": answers(llm, EVERYONE, temperature=0.0),
        "seeded": answers(llm, EVERYONE, **SAMPLED),
        "unfiltered": answers(llm, EVERYONE, temperature=1.0),
        "reversed": answers(llm, EVERYONE[::-1], **SAMPLED),
        "among greedy ones": [answers(llm, EVERYONE, [index], **SAMPLED)[index] for index in EVERYONE],
    }
    config = llm.llm_engine.vllm_config
    about = {
        "worker": config.parallel_config.worker_cls,
        "longest step in pieces": config.compilation_config.max_cudagraph_capture_size,
    }
    if "opset" in about["worker"]:
        about["kernels"] = {row["op"]: row["kernel"] for row in llm.collective_rpc("opset_report")[0]}
    print(json.dumps({**about, **found}))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
