"""A tiny vision-language model with random weights from a fixed seed, in Qwen's layout."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
SPECIAL += ("<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}"
    "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_vision_language(folder: Path, seed: int = 0) -> Path:
    """Write a Qwen3-VL of 0.2 million parameters, whose tokens are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([*SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    number = tokenizer.convert_tokens_to_ids
    rope = {"rope_type": "default", "mrope_section": [3, 3, 2], "rope_theta": 1e6}
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    text |= {"eos_token_id": number("<|im_end|>"), "pad_token_id": number("<|endoftext|>")}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    vision |= {"out_hidden_size": 64, "deepstack_visual_indexes": [0]}
    config = Qwen3VLConfig(
        text_config={**text, "vocab_size": len(tokenizer), "rope_parameters": rope},
        vision_config={**vision, "num_position_embeddings": 256},
        image_token_id=number("<|image_pad|>"),
        video_token_id=number("<|video_pad|>"),
        vision_start_token_id=number("<|vision_start|>"),
        vision_end_token_id=number("<|vision_end|>"),
    )
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(config)
    ends = {"eos_token_id": number("<|im_end|>"), "pad_token_id": number("<|endoftext|>")}
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder)
    size = {"shortest_edge": 32 * 32, "longest_edge": 128 * 128}
    Qwen2VLImageProcessorPil(size=size, patch_size=16).save_pretrained(folder)
    return folder
