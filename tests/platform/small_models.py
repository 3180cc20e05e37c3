"""config.json of tiny models that are useless in practice: platforms check it before anything is loaded."""

SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SMALL}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **SMALL, "torch_dtype": "bfloat16"}
GPT_OSS = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], **SMALL, "num_local_experts": 4}

# With vision towers.
VISION = {"hidden_size": 32, "intermediate_size": 64, "patch_size": 4}
QWEN3_VL = {
    "model_type": "qwen3_vl",
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "text_config": QWEN3
    | {
        "model_type": "qwen3_vl_text",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    },
    "vision_config": VISION | {"model_type": "qwen3_vl", "depth": 2, "num_heads": 2, "out_hidden_size": 64},
}
GEMMA3 = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": LLAMA | {"model_type": "gemma3_text", "head_dim": 16},
    "vision_config": VISION | {"model_type": "siglip_vision_model", "num_attention_heads": 2, "image_size": 16},
    "torch_dtype": "float32",
}
PALIGEMMA = GEMMA3 | {
    "model_type": "paligemma",
    "architectures": ["PaliGemmaForConditionalGeneration"],
    "text_config": LLAMA | {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], "head_dim": 16},
    "projection_dim": 64,
}
QWEN2_VL = {
    "model_type": "qwen2_vl",
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "text_config": QWEN3_VL["text_config"] | {"model_type": "qwen2_vl_text"},
    "vision_config": {"model_type": "qwen2_vl", "depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 64},
    "torch_dtype": "bfloat16",
}
