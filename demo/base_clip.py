"""The base's CLIP, trained on pictures and captions; its text tower serves as both encoders."""

import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
)

from demo import world
from demo.base_config import ClipConfig
from demo.base_text import CONTEXT
from demo.tensors import pixels, token_ids

TRAIN_LENGTH = 18  # the longest caption; the text tower is causal, so padding changes nothing


def new_clip(config: ClipConfig, vocab_size: int) -> CLIPModel:
    """An untrained CLIPModel whose last two tokens are the start and end marks."""
    tower = {
        "hidden_size": config.width,
        "intermediate_size": 4 * config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "projection_dim": config.projection_dim,
        "hidden_act": "quick_gelu",
    }
    text = tower | {
        "vocab_size": vocab_size,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": vocab_size - 2,
        "eos_token_id": vocab_size - 1,
        "pad_token_id": vocab_size - 1,
    }
    vision = tower | {"image_size": world.SIZE, "patch_size": config.patch_size}
    clip = CLIPModel(
        CLIPConfig(text_config=text, vision_config=vision, projection_dim=config.projection_dim)
    )
    for name, weight in clip.named_parameters():
        if name.endswith(("position_embedding.weight", "token_embedding.weight")):
            nn.init.normal_(weight, std=config.embedding_std)
    return clip


def image_processor() -> CLIPImageProcessor:
    """The preprocessing this CLIP was trained with: 32 x 32, mean and standard deviation 0.5."""
    return CLIPImageProcessor(
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": world.SIZE},
        crop_size={"height": world.SIZE, "width": world.SIZE},
    )


class _Teacher(nn.Module):
    """Auxiliary heads: both towers learn digit and style directly; contrast only aligns them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.image = nn.Linear(width, 10 + len(world.STYLES))
        self.text = nn.Linear(width, 10 + len(world.STYLES))

    def loss(
        self, image: Tensor, text: Tensor, digit: Tensor, style: Tensor, has_ink: Tensor
    ) -> Tensor:
        """Cross-entropy of digit and style; the text's style counts only where `has_ink` [B]."""
        image, text = self.image(image), self.text(text)
        return (
            nn.functional.cross_entropy(image[:, :10], digit)
            + nn.functional.cross_entropy(image[:, 10:], style)
            + nn.functional.cross_entropy(text[:, :10], digit)
            + nn.functional.cross_entropy(text[has_ink][:, 10:], style[has_ink])
        )


def _contrast(logits: Tensor, fits: Tensor) -> Tensor:
    """CLIP's loss on logits [image, caption] where a caption may fit several pictures."""
    to_text = (fits / fits.sum(1, keepdim=True) * logits.log_softmax(1)).sum(1).mean()
    to_image = (fits / fits.sum(0, keepdim=True) * logits.log_softmax(0)).sum(0).mean()
    return -(to_text + to_image) / 2


def _batch_styles(step: int, count: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """A batch in one, three or all styles: few styles make the digits the hard negatives."""
    kinds = (1, 3, len(world.STYLES))[step % 3]
    return rng.permutation(len(world.STYLES))[:kinds][rng.integers(kinds, size=count)]


class _Batch(NamedTuple):
    """Pictures with one caption each, and their labels."""

    images: Tensor  # [B, 3, H, W]
    texts: list[str]
    fits: Tensor  # [B, B] float: whether caption j is true of picture i
    digit: Tensor  # [B]
    style: Tensor  # [B]
    has_ink: Tensor  # [B] bool: whether the caption names the ink


def _draw_batch(
    step: int, x8: NDArray[Any], labels: NDArray[Any], count: int, rng: np.random.Generator
) -> _Batch:
    rows = rng.integers(len(x8), size=count)
    style = _batch_styles(step, count, rng)
    images = pixels(world.render(x8[rows], style, rng))
    drawn = list(zip(labels[rows].tolist(), style.tolist(), strict=True))
    texts = [world.caption(digit, look, rng, None) for digit, look in drawn]
    asked = [world.parse(text) for text in texts]
    fits = torch.tensor(
        [[a.digit == digit and look in a.styles() for a in asked] for digit, look in drawn]
    ).float()
    has_ink = torch.tensor([a.ink is not None for a in asked])
    return _Batch(
        images, texts, fits, torch.from_numpy(labels[rows]), torch.from_numpy(style), has_ink
    )


def train_clip(config: ClipConfig, tokenizer: CLIPTokenizer, seed: int) -> CLIPModel:
    """A CLIPModel trained on the digits of the training split in all styles."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    clip, teacher = new_clip(config, len(tokenizer)), _Teacher(config.projection_dim)
    weights = [*clip.parameters(), *teacher.parameters()]
    optimizer = torch.optim.AdamW(
        weights, config.learning_rate, (0.9, 0.98), weight_decay=config.weight_decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.learning_rate, config.steps, pct_start=0.1
    )
    x8, labels = world.digits("train")
    for step in range(config.steps):
        batch = _draw_batch(step, x8, labels, config.batch_size, rng)
        ids = token_ids(tokenizer, batch.texts, TRAIN_LENGTH)
        out = clip(input_ids=ids, pixel_values=batch.images)
        loss = _contrast(out.logits_per_image, batch.fits) + teacher.loss(
            clip.visual_projection(out.vision_model_output.pooler_output),
            clip.text_projection(out.text_model_output.pooler_output),
            batch.digit,
            batch.style,
            batch.has_ink,
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        clip.logit_scale.data.clamp_(max=np.log(100))  # as the CLIP paper does
        if step % 50 == 0:
            print(f"clip step {step}: loss {loss.item():.3f}", flush=True)
    return clip.eval()


@torch.no_grad()
def caption_accuracy(clip: CLIPModel, tokenizer: CLIPTokenizer) -> float:
    """Top-1 accuracy of held-out pictures against all 210 full captions."""
    x8, labels = world.digits("held_out")
    rng = np.random.default_rng(99)
    style = rng.integers(len(world.STYLES), size=len(x8))
    texts = [world.captions(d, s)[0] for d in range(10) for s in range(len(world.STYLES))]
    logits = clip(
        input_ids=token_ids(tokenizer, texts, TRAIN_LENGTH),
        pixel_values=pixels(world.render(x8, style, rng)),
    ).logits_per_image
    own = torch.from_numpy(labels * len(world.STYLES) + style)
    return (logits.argmax(1) == own).float().mean().item()


def text_encoders(clip: CLIPModel) -> tuple[CLIPTextModel, CLIPTextModelWithProjection]:
    """SDXL's two text encoders, each a copy of the CLIP's text tower."""
    config = copy.deepcopy(clip.config.text_config)
    config.projection_dim = clip.config.projection_dim
    first, second = CLIPTextModel(config), CLIPTextModelWithProjection(config)
    weights = clip.state_dict()
    # transformers 5 names the first encoder's weights without the prefix, the second's with it.
    first.load_state_dict({name: weights[f"text_model.{name}"] for name in first.state_dict()})
    second.load_state_dict({name: weights[name] for name in second.state_dict()})
    return first.eval(), second.eval()
