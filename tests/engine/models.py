"""Random models of a few thousand parameters. Their logits are far enough apart to compare tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers import models as architectures

VOCABULARY = 320
# Wide enough that the logits of two tokens are seldom close: the default would make them nearly equal.
SPREAD = 0.3

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": SPREAD,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 32}

CONFIGS = {
    "qwen3": lambda: architectures.Qwen3Config(**GROUPED),
    "llama3": lambda: architectures.LlamaConfig(
        **GROUPED,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": lambda: architectures.MistralConfig(**GROUPED, sliding_window=32),
    "gemma2": lambda: architectures.Gemma2Config(
        **GROUPED, sliding_window=32, query_pre_attn_scalar=32, attn_logit_softcapping=5.0, final_logit_softcapping=10.0
    ),
    # Its layers take keyword arguments that they do not use.
    "gemma3": lambda: architectures.Gemma3TextConfig(**GROUPED, sliding_window=32, query_pre_attn_scalar=32),
    # Its layers differ in head size. The last two layers read the KV cache of the first two.
    "gemma4": lambda: architectures.Gemma4TextConfig(
        **{**GROUPED, "num_hidden_layers": 4},
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"] * 2,
        per_layer_config={"01": {"head_dim": 64}, "03": {"head_dim": 64}},
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=16,
    ),
    # Only layers with a window use rotary embedding.
    "exaone4": lambda: architectures.Exaone4Config(
        **GROUPED, sliding_window=32, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "gpt_neox": lambda: architectures.GPTNeoXConfig(**SMALL, rotary_pct=0.25),
}

# vLLM takes the head size from the hidden size for some of them.
EXPERTS = {**GROUPED, "head_dim": 16, "num_hidden_layers": 2, "num_experts_per_tok": 3}

GPT_OSS = {
    **EXPERTS,
    "num_local_experts": 8,
    "sliding_window": 32,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}

# Mixtures of experts.
MIXTURES = {
    "qwen3_moe": lambda: architectures.Qwen3MoeConfig(
        **EXPERTS, num_experts=8, moe_intermediate_size=48, norm_topk_prob=True
    ),
    # With a shared expert and its gate.
    "qwen2_moe": lambda: architectures.Qwen2MoeConfig(
        **EXPERTS, num_experts=6, moe_intermediate_size=48, shared_expert_intermediate_size=64
    ),
    "mixtral": lambda: architectures.MixtralConfig(**EXPERTS, num_local_experts=8),
    "olmoe": lambda: architectures.OlmoeConfig(**EXPERTS, num_experts=16),
    # Sigmoid, correction bias, groups, a shared expert and a first layer without experts.
    "glm4_moe": lambda: architectures.Glm4MoeConfig(
        **EXPERTS,
        n_routed_experts=8,
        n_shared_experts=1,
        moe_intermediate_size=48,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        norm_topk_prob=True,
    ),
    "granitemoe": lambda: architectures.GraniteMoeConfig(**EXPERTS, num_local_experts=8),
    # Its attention passes a shape to vLLM's attention layer, after query, key and value. vLLM reads the settings that
    # transformers leaves out.
    "hy_v3": lambda: architectures.HYV3Config(
        **EXPERTS,
        num_experts=8,
        moe_intermediate_size=48,
        expert_hidden_dim=48,
        first_k_dense_replace=1,
        qk_norm=True,
        route_norm=True,
    ),
    # Sinks, a window in every other layer, biases of the router and the experts, and long rotary embedding by YaRN.
    "gpt_oss": lambda: architectures.GptOssConfig(**GPT_OSS),
}

# Prompt lengths: one token, less and more than a page, more than a window, more than a step takes at a time.
LENGTHS = (1, 7, 16, 40, 77, 150)


def build(name: str, folder: Path, seed: int = 0, **changes) -> PreTrainedModel:
    """Saves the model of that name to the folder. The same seed gives the same weights. changes: to its config."""
    torch.manual_seed(seed)
    config = (CONFIGS | MIXTURES)[name]()
    config.update(changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    randomise(model)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer += SPREAD * torch.randn_like(buffer)
    model.save_pretrained(folder)
    return model


def randomise(model: PreTrainedModel) -> None:
    """Draws norm weights and biases. transformers leaves them at 1 and 0, where no mistake with them would show."""
    for path, parameter in model.named_parameters():
        if parameter.ndim == 1 or path.endswith("bias"):
            parameter.data += SPREAD * torch.randn_like(parameter)


def prompts(lengths=LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def generate(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> tuple[list[int], float]:
    """The greedy answer of transformers, and the smallest margin of a chosen token's logit over the next best."""
    mask = torch.ones(1, len(prompt), dtype=torch.long)
    return answer(model, {"input_ids": torch.tensor([prompt]), "attention_mask": mask}, num_tokens)


def answer(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor], num_tokens: int) -> tuple[list[int], float]:
    """As `generate`, for a model's inputs of one prompt."""
    result = model.generate(
        **inputs,
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=2,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.cat(result.logits).topk(2).values
    return result.sequences[0, inputs["input_ids"].shape[1] :].tolist(), float((best[:, 0] - best[:, 1]).min())


@torch.inference_mode()
def logprobs(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Those of the answer's tokens, in fp32."""
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


def mean_error(model: PreTrainedModel, prompts, answers) -> float:
    """The mean error of the tokens' log-probabilities, compared with the model's. answers: see `engines.chosen`."""
    errors = [
        (found - logprobs(model, prompt, answer)).abs()
        for prompt, (answer, found) in zip(prompts, answers, strict=True)
    ]
    return float(torch.cat(errors).mean())


def add_tokenizer(folder: Path, further: Sequence[str] = ()) -> None:
    """Adds a tokenizer with a token for every byte to a model's folder. further: special tokens, which come last."""
    specials = ["<bos>", "<eos>", "<pad>"]
    pieces = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [f"<unused {i}>" for i in range(VOCABULARY - len(pieces) - len(further))]
    pieces += further
    tokenizer = Tokenizer(tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = dict(zip(("bos_token", "eos_token", "pad_token"), specials, strict=True))
    names["additional_special_tokens"] = list(further)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
