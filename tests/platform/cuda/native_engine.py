"""Prints as JSON the answers of an engine on a small random model. Its platform and parts come from the environment.

Its argument is JSON: more arguments of LLM, and the kind of the model.
"""

import json
import sys
import tempfile

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from vllm import LLM, SamplingParams

VOCABULARY = 500
PROMPTS = [[(7 * i * i + 13 * j) % VOCABULARY for i in range(n)] for j, n in enumerate((1, 5, 16, 40, 77, 300))]
EVERYONE = list(range(len(PROMPTS)))
SAMPLED = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}


# Each token has all of the experts, so that no rounding changes the choice.
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "norm_topk_prob": True}
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # so wide that attention shows in the log-probabilities
}
# By kinds of models: the architecture, and what it has beside or in place of SIZES.
MODELS: dict[str, tuple[str, dict]] = {
    "dense": ("qwen3", {}),
    "experts": ("qwen3_moe", EXPERTS),
    # With wider weights, rounding alone would change log-probabilities of these two by more than 0.3.
    "ALiBi": ("bloom", {"hidden_size": 256, "num_key_value_heads": 4, "initializer_range": 0.15}),
    "sinks": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 4, "sliding_window": 32, "initializer_range": 0.2},
    ),
    # The last of the four layers has softmax attention.
    "hybrid": (
        "qwen3_next",
        EXPERTS
        | {
            "num_hidden_layers": 4,
            "shared_expert_intermediate_size": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
    "multimodal": ("qwen3_vl", {}),
    "drafts": ("qwen3", {}),  # the model drafts for itself
}
VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "out_hidden_size": SIZES["hidden_size"],
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}


def save_model(folder: str, kind: str) -> None:
    """Saves the same weights every time."""
    torch.manual_seed(0)
    architecture, more = MODELS[kind]
    sizes, build = SIZES | more, AutoModelForCausalLM
    if kind == "multimodal":
        rotary = {"rope_type": "default", "mrope_section": [12, 10, 10], "mrope_interleaved": True}
        text, build = sizes | {"rope_parameters": rotary | {"rope_theta": 10000.0}}, AutoModelForImageTextToText
        ids = zip(("image", "video", "vision_start", "vision_end"), range(VOCABULARY - 4, VOCABULARY), strict=True)
        sizes = {"text_config": text, "vision_config": VISION} | {f"{name}_token_id": number for name, number in ids}
    config = AutoConfig.for_model(architecture, **sizes)
    build.from_config(config).to(torch.bfloat16).save_pretrained(folder)


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


def counter(llm: LLM, name: str) -> int:
    """One of vLLM's metrics."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:{name}")


def main(kind: str = "dense", **arguments) -> None:
    if kind == "multimodal":
        arguments["limit_mm_per_prompt"] = {"image": 0, "video": 0}  # vLLM then needs no processor of images
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, kind)
        if kind == "drafts":
            drafts = {"method": "draft_model", "model": folder, "num_speculative_tokens": 3}
            arguments |= {"speculative_config": drafts, "disable_log_stats": False}
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
    scheduler, max_model_len = config.scheduler_config, config.model_config.max_model_len
    about = {
        "longest step": min(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * max_model_len),
        "worker": config.parallel_config.worker_cls,
        "longest captured step": config.compilation_config.max_cudagraph_capture_size,
    }
    if kind == "drafts":
        accepted, drafted = (counter(llm, f"spec_decode_num_{what}_tokens") for what in ("accepted", "draft"))
        about["accepted"] = accepted / drafted
    if "opset" in about["worker"]:
        about["kernels"] = {row["op"]: row["kernel"] for row in llm.collective_rpc("opset_report")[0]}
    print(json.dumps({**about, **found}))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
