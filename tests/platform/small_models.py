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
