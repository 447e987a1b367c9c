"""Tiny models in the layouts of published ones, with random weights from a fixed seed."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    DiffusionPipeline,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessorPil,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

START, END = "<|startoftext|>", "<|endoftext|>"
CHARACTERS = sorted(ByteLevel.alphabet())
VOCABULARY = {
    token: index
    for index, token in enumerate([*CHARACTERS, *(c + "</w>" for c in CHARACTERS), START, END])
}


def make_tokenizer(pad_token: str = END) -> CLIPTokenizer:
    """CLIP's byte-level tokenizer without merges: one token per letter."""
    return CLIPTokenizer(vocab=VOCABULARY, merges=[], pad_token=pad_token, model_max_length=77)


def make_text_config() -> CLIPTextConfig:
    return CLIPTextConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_hidden_layers=2,
        vocab_size=len(VOCABULARY),
        bos_token_id=VOCABULARY[START],
        eos_token_id=VOCABULARY[END],
        pad_token_id=1,
        projection_dim=24,
    )


def make_t5_tokenizer() -> T5TokenizerFast:
    """T5's unigram tokenizer: one token per letter, at most 20 tokens."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), ("\u2581", -1.0)]
    letters = [(chr(code), -2.0) for code in range(33, 383)]
    return T5TokenizerFast(vocab=special + letters, extra_ids=0, model_max_length=20)


def make_t5() -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=400,
            d_model=80,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
        )
    )


#: A chat template in the manner of Qwen's, with its switch `enable_thinking`.
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }} {{ message.content }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>a{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<t></t>{% endif %}"
)
QWEN_IMAGE_TOKENS = 288  # Qwen-Image's template has 230 letters
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<t>", "</t>")
QWEN_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def make_qwen_tokenizer(length: int = 40, more: tuple[str, ...] = ()) -> Qwen2Tokenizer:
    """Qwen's byte-level tokenizer without merges: one token per letter, at most `length`."""
    special = QWEN_SPECIAL + more
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate([*CHARACTERS, *special])},
        merges=[],
        model_max_length=length,
        additional_special_tokens=list(special[1:]),
    )
    tokenizer.chat_template = CHAT
    return tokenizer


def make_qwen3(layers: int) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=272,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            tie_word_embeddings=True,
        )
    )


def make_vae(**more: object) -> AutoencoderKL:
    """A VAE with factor 4."""
    settings = {
        "block_out_channels": (8, 16, 16),
        "down_block_types": ["DownEncoderBlock2D"] * 3,
        "up_block_types": ["UpDecoderBlock2D"] * 3,
        "latent_channels": 4,
        "norm_num_groups": 4,
        "sample_size": 32,
        "scaling_factor": 0.5,
        **more,
    }
    return AutoencoderKL(**settings)  # type: ignore[arg-type]


def make_unet(**more: object) -> UNet2DConditionModel:
    settings = {
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "sample_size": 8,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": (2, 4),
        "norm_num_groups": 8,
        "use_linear_projection": True,
        **more,
    }
    return UNet2DConditionModel(**settings)  # type: ignore[arg-type]


#: A UNet with one block of each kind, which compiles in half the time.
MINIMAL_UNET: dict[str, object] = {
    "block_out_channels": (16,),
    "down_block_types": ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",),
    "attention_head_dim": 2,
}


def make_scheduler() -> EulerDiscreteScheduler:
    return EulerDiscreteScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        timestep_spacing="leading",
        steps_offset=1,
    )


def make_sd3(t5: bool) -> StableDiffusion3Pipeline:
    """32 x 32 pictures, 8 latent channels; embeddings have 64 features (CLIP) and 80 (T5)."""
    torch.manual_seed(4)
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=8,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=80,
            caption_projection_dim=32,
            pooled_projection_dim=48,
            out_channels=8,
            pos_embed_max_size=12,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=make_vae(
            latent_channels=8, shift_factor=0.06, use_quant_conv=False, use_post_quant_conv=False
        ),
        text_encoder=CLIPTextModelWithProjection(make_text_config()),
        tokenizer=make_tokenizer(),
        text_encoder_2=CLIPTextModelWithProjection(make_text_config()),
        tokenizer_2=make_tokenizer("!"),
        text_encoder_3=make_t5() if t5 else None,
        tokenizer_3=make_t5_tokenizer() if t5 else None,
    )


def save_sdxl(
    folder: Path,
    transformer_layers: tuple[int, ...] = (1, 1),
    first: Any = CLIPTextModel,
    **more: object,
) -> None:
    """Write a StableDiffusionXLPipeline: 32 x 32 pictures, VAE with factor 4.

    Args:
        first: class of the first text encoder.
    """
    torch.manual_seed(0)
    pipeline = StableDiffusionXLPipeline(
        vae=make_vae(),
        text_encoder=first(make_text_config()),
        text_encoder_2=CLIPTextModelWithProjection(make_text_config()),
        tokenizer=make_tokenizer(),
        tokenizer_2=make_tokenizer("!"),
        unet=make_unet(
            cross_attention_dim=64,
            transformer_layers_per_block=transformer_layers,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + 24,
            **more,
        ),
        scheduler=make_scheduler(),
        add_watermarker=False,
    )
    pipeline.save_pretrained(folder)


def save_sd(folder: Path, **more: object) -> None:
    """Write a StableDiffusionPipeline in the layout of Stable Diffusion 1 and 2."""
    torch.manual_seed(1)
    pipeline = StableDiffusionPipeline(
        vae=make_vae(),
        text_encoder=CLIPTextModel(make_text_config()),
        tokenizer=make_tokenizer(),
        unet=make_unet(cross_attention_dim=32, **more),
        scheduler=make_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(folder)


def save_sd3(folder: Path) -> None:
    """Write a StableDiffusion3Pipeline in the layout of Stable Diffusion 3 and 3.5."""
    make_sd3(t5=True).save_pretrained(folder)


def save_sd3_without_t5(folder: Path) -> None:
    """The same without the T5 text encoder, a common choice to save memory."""
    make_sd3(t5=False).save_pretrained(folder)


def save_flux(
    folder: Path,
    *,
    guidance: bool = True,
    layers: tuple[int, int] = (1, 2),
    wide: int = 1,
    kind: type[DiffusionPipeline] = FluxPipeline,
) -> None:
    """Write a FluxPipeline: FLUX.1 dev, or schnell, which lacks guidance and the shift by size.

    Args:
        kind: the pipeline's class.
        layers: numbers of blocks with two streams and with one.
        wide: multiple of the width of each of two heads.
    """
    torch.manual_seed(6)
    pipeline = kind(
        transformer=FluxTransformer2DModel(
            in_channels=32,
            num_layers=layers[0],
            num_single_layers=layers[1],
            attention_head_dim=16 * wide,
            num_attention_heads=2,
            joint_attention_dim=80,
            pooled_projection_dim=32,
            guidance_embeds=guidance,
            axes_dims_rope=(4 * wide, 6 * wide, 6 * wide),
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(
            shift=3.0 if guidance else 1.0, use_dynamic_shifting=guidance
        ),
        vae=make_vae(
            latent_channels=8, shift_factor=0.1, use_quant_conv=False, use_post_quant_conv=False
        ),
        text_encoder=CLIPTextModel(make_text_config()),
        tokenizer=make_tokenizer(),
        text_encoder_2=make_t5(),
        tokenizer_2=make_t5_tokenizer(),
    )
    with torch.no_grad():  # else the prompt has little effect with random weights
        pipeline.transformer.context_embedder.weight *= 8
        pipeline.transformer.proj_out.weight *= 8
    pipeline.save_pretrained(folder)


def save_flux2(folder: Path, *, distilled: bool = False) -> None:
    """Write a Flux2KleinPipeline: of the base model, or of the distilled one."""
    torch.manual_seed(7)
    vae = AutoencoderKLFlux2(
        block_out_channels=(8, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=32,
    )
    vae.bn.running_mean.normal_(0, 0.3)
    vae.bn.running_var.uniform_(0.5, 2)
    pipeline = Flux2KleinPipeline(
        transformer=Flux2Transformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=48,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=False,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=vae,
        text_encoder=make_qwen3(28),
        tokenizer=make_qwen_tokenizer(),
        is_distilled=distilled,
    )
    with torch.no_grad():  # else the prompt has little effect with random weights
        pipeline.transformer.context_embedder.weight *= 64
        pipeline.transformer.double_stream_modulation_img.linear.weight *= 8
        pipeline.transformer.single_stream_modulation.linear.weight *= 8
    pipeline.save_pretrained(folder)


def save_z_image(folder: Path) -> None:
    """Write a ZImagePipeline, whose text encoder's states have 16 features."""
    torch.manual_seed(8)
    pipeline = ZImagePipeline(
        transformer=ZImageTransformer2DModel(
            in_channels=4,
            dim=32,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=16,
            axes_dims=[4, 6, 6],
            axes_lens=[160, 32, 32],
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=make_vae(shift_factor=0.1, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=make_qwen3(3),
        tokenizer=make_qwen_tokenizer(64),
    )
    with torch.no_grad():  # else padding and the prompt have little effect with random weights
        pipeline.transformer.x_pad_token.normal_()
        pipeline.transformer.cap_pad_token.normal_()
        for layer in pipeline.transformer.layers:
            layer.adaLN_modulation[0].weight *= 4
    pipeline.save_pretrained(folder)


def make_qwen_vl(**ids: int) -> Qwen2_5_VLForConditionalGeneration:
    text = {
        "vocab_size": 272,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 16,
    }
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
    return Qwen2_5_VLForConditionalGeneration(config)


def save_qwen_image(folder: Path) -> None:
    """Write a QwenImagePipeline: 32 x 32 pictures, a VAE of frames with factor 4."""
    torch.manual_seed(9)
    pipeline = QwenImagePipeline(
        **make_qwen_image_parts(),
        text_encoder=make_qwen_vl(),
        tokenizer=make_qwen_tokenizer(QWEN_IMAGE_TOKENS),
    )
    pipeline.save_pretrained(folder)


def make_qwen_image_parts(**more: object) -> dict[str, Any]:
    """Transformer, scheduler and VAE; `more` settings of the transformer."""
    parts: dict[str, Any] = {
        "transformer": QwenImageTransformer2DModel(
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            axes_dims_rope=(4, 6, 6),
            **more,
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
        ),
        "vae": AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            latents_mean=[0.1, -0.2, 0.3, 0.0],
            latents_std=[0.5, 1.5, 0.8, 1.2],
        ),
    }
    with torch.no_grad():  # else the prompt has little effect with random weights
        for block in parts["transformer"].transformer_blocks:
            block.img_mod[1].weight *= 32
        parts["transformer"].proj_out.weight *= 4
    return parts


def save_qwen_image_edit(folder: Path) -> None:
    """Write a QwenImageEditPlusPipeline, in the manner of 2511; its Qwen2.5-VL sees pictures.

    Its processor's class wants torchvision: the folder has the files that it reads.
    """
    torch.manual_seed(10)
    tokenizer = make_qwen_tokenizer(1024, QWEN_VISION)
    names = ("vision_start", "vision_end", "image", "video")
    ids = tokenizer.convert_tokens_to_ids(list(QWEN_VISION))
    numbers = {f"{name}_token_id": number for name, number in zip(names, ids, strict=True)}
    pipeline = QwenImageEditPlusPipeline(
        **make_qwen_image_parts(zero_cond_t=True),
        text_encoder=make_qwen_vl(**numbers),
        tokenizer=tokenizer,
        processor=None,
    )
    pipeline.save_pretrained(folder)
    index = folder / "model_index.json"
    fields = json.loads(index.read_text(encoding="utf-8"))
    fields["processor"] = ["transformers", "Qwen2VLProcessor"]
    index.write_text(json.dumps(fields, indent=1), encoding="utf-8")
    size = {"shortest_edge": 56 * 56, "longest_edge": 12845056}
    Qwen2VLImageProcessorPil(size=size).save_pretrained(folder / "processor")
    tokenizer.save_pretrained(folder / "processor")


def save_vae(folder: Path) -> None:
    """Write an AutoencoderKL with other weights."""
    torch.manual_seed(2)
    make_vae().save_pretrained(folder)


def save_clip(folder: Path) -> None:
    """Write a CLIPModel with image processor and tokenizer: 32 x 32 pictures, 24 features."""
    torch.manual_seed(3)
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "image_size": 32,
        "patch_size": 8,
        "projection_dim": 24,
    }
    text = make_text_config().to_dict()
    CLIPModel(
        CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)
    ).save_pretrained(folder)
    size = {"shortest_edge": 32}
    CLIPImageProcessor(size=size, crop_size={"height": 32, "width": 32}).save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps(VOCABULARY), encoding="utf-8")


def save_classifier(folder: Path) -> None:
    """Write a ViT that classifies 32 x 32 pictures, with image processor and three labels."""
    torch.manual_seed(4)
    config = ViTConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_hidden_layers=2,
        image_size=32,
        patch_size=8,
        id2label={0: "drawing", 1: "Not Safe", 2: "photo"},
        label2id={"drawing": 0, "Not Safe": 1, "photo": 2},
    )
    ViTForImageClassification(config).save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)


#: Folder name -> function that writes the folder.
MODELS = {
    "tiny-sdxl": save_sdxl,
    "tiny-sd": save_sd,
    "least-sdxl": partial(save_sdxl, transformer_layers=(1,), **MINIMAL_UNET),
    "least-sdxl-projecting": partial(
        save_sdxl, transformer_layers=(1,), first=CLIPTextModelWithProjection, **MINIMAL_UNET
    ),
    "least-sd": partial(save_sd, **MINIMAL_UNET),
    "tiny-sd3": save_sd3,
    "tiny-sd3-without-t5": save_sd3_without_t5,
    "tiny-flux": save_flux,
    "tiny-flux-schnell": partial(save_flux, guidance=False),
    "tiny-flux-kontext": partial(save_flux, kind=FluxKontextPipeline),
    "deep-flux": partial(save_flux, layers=(3, 5), wide=8),
    "tiny-flux2": save_flux2,
    "tiny-flux2-distilled": partial(save_flux2, distilled=True),
    "tiny-z-image": save_z_image,
    "tiny-qwen-image": save_qwen_image,
    "tiny-qwen-image-edit": save_qwen_image_edit,
    "tiny-vae": save_vae,
    "tiny-clip": save_clip,
    "tiny-classifier": save_classifier,
}
