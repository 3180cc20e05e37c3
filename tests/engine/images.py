"""Random multimodal models of a few thousand parameters, with their processors, and the answers to their prompts."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import models
import torch
from models import SPREAD, VOCABULARY
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, PreTrainedModel, ProcessorMixin
from transformers import models as architectures
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

START, IMAGE, END, VIDEO = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"
# vLLM looks for tokens of several line ends in Gemma-3's vocabulary.
SPECIALS = (START, IMAGE, END, VIDEO, *("\n" * number for number in range(1, 5)))
IDS = {name: VOCABULARY - len(SPECIALS) + place for place, name in enumerate(SPECIALS)}

PATCH, MERGE, SIDE = 4, 2, 16  # pixels of a patch, patches of a token, pixels of Llava's and Gemma-3's images
IMAGE_TOKENS = (SIDE // PATCH) ** 2
TEXT = {**models.GROUPED, "head_dim": 16}
VISION = {"hidden_size": 32, "intermediate_size": 48, "patch_size": PATCH, "initializer_range": SPREAD}
CLIP = {**VISION, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": SIDE}
VISION_OF_QWEN = {
    **VISION,
    "depth": 3,
    "num_heads": 2,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "out_hidden_size": TEXT["hidden_size"],
}
OF_QWEN = {
    "image_token_id": IDS[IMAGE],
    "video_token_id": IDS[VIDEO],
    "vision_start_token_id": IDS[START],
    "vision_end_token_id": IDS[END],
}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}

CONFIGS = {
    # The vision tower of CLIP, with LayerNorm and QuickGELU.
    "llava": lambda: architectures.LlavaConfig(
        text_config=architectures.LlamaConfig(**TEXT),
        vision_config=architectures.CLIPVisionConfig(**CLIP),
        image_token_index=IDS[IMAGE],
        image_seq_length=IMAGE_TOKENS,
    ),
    # The tokens of an image see each other. They are as many as the first layers' window.
    "gemma3": lambda: architectures.Gemma3Config(
        text_config=architectures.Gemma3TextConfig(**TEXT, sliding_window=IMAGE_TOKENS, query_pre_attn_scalar=16),
        vision_config=architectures.SiglipVisionConfig(**CLIP),
        mm_tokens_per_image=IMAGE_TOKENS,
        boi_token_index=IDS[START],
        eoi_token_index=IDS[END],
        image_token_index=IDS[IMAGE],
        initializer_range=SPREAD,
    ),
    # All layers of the vision tower but one attend in windows of two by two tokens.
    "qwen2_5_vl": lambda: architectures.Qwen2_5_VLConfig(
        text_config=TEXT | {"rope_parameters": SECTIONS},
        vision_config=VISION_OF_QWEN | {"window_size": 2 * MERGE * PATCH, "fullatt_block_indexes": [1]},
        **OF_QWEN,
    ),
    # Two layers of the vision tower feed the first layers of the text tower (deepstack).
    "qwen3_vl": lambda: architectures.Qwen3VLConfig(
        text_config=TEXT | {"rope_parameters": SECTIONS | {"mrope_interleaved": True}},
        vision_config=VISION_OF_QWEN | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        **OF_QWEN,
    ),
}


class _Qwen2_5VLProcessor(architectures.Qwen2_5_VLProcessor):
    """Without videos, for which transformers needs torchvision. vLLM reads what settings they would have."""

    video_processor = Qwen2VLImageProcessorPil

    def __init__(self, image_processor, tokenizer):
        super().__init__(image_processor, tokenizer)


class _Qwen3VLProcessor(architectures.Qwen3VLProcessor):
    """As above."""

    video_processor = Qwen2VLImageProcessorPil

    def __init__(self, image_processor, tokenizer):
        super().__init__(image_processor, tokenizer)


def _of_llava(tokenizer) -> ProcessorMixin:
    images = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    return architectures.LlavaProcessor(
        images,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token=IMAGE,
        num_additional_image_tokens=1,  # CLIP's class token, which Llava leaves out
    )


def _of_gemma3(tokenizer) -> ProcessorMixin:
    images = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    return architectures.Gemma3Processor(images, tokenizer, image_seq_length=IMAGE_TOKENS)


def _of_qwen(kind: type[ProcessorMixin], tokenizer) -> ProcessorMixin:
    pixels = (PATCH * MERGE) ** 2  # of a token
    size = {"shortest_edge": pixels, "longest_edge": 64 * pixels}
    return kind(Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, size=size), tokenizer)


PROCESSORS = {
    "llava": _of_llava,
    "gemma3": _of_gemma3,
    "qwen2_5_vl": partial(_of_qwen, _Qwen2_5VLProcessor),
    "qwen3_vl": partial(_of_qwen, _Qwen3VLProcessor),
}


def build(name: str, folder: Path, monkeypatch) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Saves the model of that name to the folder, with a tokenizer. From now on, vLLM loads the processor returned."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIGS[name](), attn_implementation="eager").float().eval()
    models.randomise(model)
    if name == "gemma3":
        # transformers leaves this weight at 0, and with such an LM head the last token would be repeated.
        model.model.multi_modal_projector.mm_input_projection_weight.data.normal_(std=SPREAD)
        model.get_input_embeddings().weight.data *= 0.1
    model.save_pretrained(folder)
    if name in ("llava", "gemma3"):
        _name_as_published(folder / "model.safetensors")
    models.add_tokenizer(folder, SPECIALS)
    names = {"boi_token": START, "image_token": IMAGE, "eoi_token": END} if name == "gemma3" else {}
    processor = PROCESSORS[name](AutoTokenizer.from_pretrained(folder, extra_special_tokens=names))
    processor.save_pretrained(folder)  # from 0.33 on, vLLM reads the mean of pixels here
    for loader in (AutoProcessor, ProcessorMixin):
        monkeypatch.setattr(loader, "from_pretrained", lambda *_, **__: processor)
    return model, processor


def _name_as_published(weights: Path) -> None:
    """Gives weights of the vision tower the names of published checkpoints. transformers 5 saves others."""
    names = {name: name.replace("vision_tower.", "vision_tower.vision_model.") for name in load_file(weights)}
    save_file({names[name]: weight for name, weight in load_file(weights).items()}, weights, {"format": "pt"})


def placeholder(name: str) -> str:
    """What stands for a picture in a prompt."""
    return START if name == "gemma3" else f"{START}{IMAGE}{END}"


def picture(width: int, height: int, seed: int) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    return Image.fromarray(torch.randint(256, (height, width, 3), generator=generator, dtype=torch.uint8).numpy())


def expected(model, processor, text: str, pictures: Sequence[Image.Image], num_tokens: int) -> tuple[list[int], float]:
    """The answer of transformers, and its smallest margin: see `models.generate`."""
    return models.answer(model, processor(text=[text], images=pictures or None, return_tensors="pt"), num_tokens)


def asked(text: str, pictures: Sequence[Image.Image]) -> dict:
    """The prompt for vLLM."""
    return {"prompt": text} | ({"multi_modal_data": {"image": pictures}} if pictures else {})
