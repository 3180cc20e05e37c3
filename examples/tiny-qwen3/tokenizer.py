"""tiny-qwen3's tokenizer: a token per UTF-8 byte, so that any text can be encoded, and for a few whole words."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# What the prompts are made of, one token each: it halves them. Tasks' own letters and digits stay one token per byte.
WORDS = """
system user assistant add: subtract: largest: count: reverse: copy: upper: sort: repeat:
What Which largest Count from Write backwards again capitals Sort digits times
"""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges. Generation ends at `<|im_end|>`; padding is `<|endoftext|>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in (END_OF_TEXT, TURN_START, TURN_END)])
    backend.add_tokens([AddedToken(w, single_word=True, normalized=False) for w in WORDS.split()])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
