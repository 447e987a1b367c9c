"""What a UNet may see beside text: masks of pictures that are to be painted, aesthetic scores."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, UNet2DConditionModel
from picture_bytes import noise_picture
from PIL import Image

from artifacts.image_shards import Sample
from artifacts.latent_shards import LatentShard, from_bfloat16
from artifacts.records import digest_bytes
from configs.errors import Refused
from configs.settings.train import Train
from runtimes.families.inpainting_aesthetics import ExtraInputs, added_weights
from runtimes.objective.random_draws import Stream, generator
from runtimes.pipeline_folder.folder import Base, read_config, trained_config
from runtimes.torch.device import open_device
from runtimes.torch.sampler import Sampler
from runtimes.torch_models.loading import load_denoiser
from runtimes.torch_models.vae_text_encoders import Encoder
from tasks.encode.crop_to_bucket import TransformSettings, draw_mask
from tasks.encode.shard import ShardEncoder
from tasks.publish.assemble import assemble

pytestmark = pytest.mark.slow

SETTINGS = TransformSettings(
    **{"resolution": 32, "aspect_buckets": False, "bucket_step": 64, "max_aspect": 2.0},
    **{"crop": "center", "flip": True, "seed": 0, "holdout": 0.0, "max_pixels": 10**6},
    **{"masks": 3, "scored": True},
)


def samples() -> Iterator[Sample]:
    for number in range(5):
        picture = noise_picture(number, 32, 32)
        meta: dict[str, Any] = {"sha256": digest_bytes(picture)}
        if number != 4:
            meta["aesthetic_score"] = 4.5 + number
        yield Sample(f"{number}", picture, "png", ("a",), meta)


def test_masks_are_drawn_by_the_picture_and_a_quarter_hides_everything() -> None:
    size = (64, 48)
    masks = [draw_mask(0, number.to_bytes(32, "big"), 1, size) for number in range(2000)]
    np.testing.assert_array_equal(masks[7], draw_mask(0, (7).to_bytes(32, "big"), 1, size))
    assert (masks[7] != draw_mask(0, (7).to_bytes(32, "big"), 2, size)).any()
    whole = [mask.all() for mask in masks]
    assert np.mean(whole) == pytest.approx(0.25, abs=0.03)
    shares = [mask.mean() for mask, full in zip(masks, whole, strict=True) if not full]
    assert all(mask.shape == size and mask.any() for mask in masks)
    assert 0.15 < np.mean(shares) < 0.25 and max(shares) < 0.6


def test_masks_and_scores_are_encoded_beside_the_pictures(tiny_sdxl: Path, tmp_path: Path) -> None:
    encoder = Encoder(Base.open(tiny_sdxl), device="cpu")
    facts = ShardEncoder(encoder, SETTINGS, 2).encode(samples(), tmp_path / "shard")
    assert facts["groups"] == {"train/8x8": 4} and facts["bad_reasons"] == {"no aesthetic score": 1}
    shard = LatentShard(tmp_path / "shard")
    for index, sample in zip(range(4), samples(), strict=False):
        for turn, group in enumerate(("train/8x8", "flipped/8x8")):
            read = shard.sample(group, index)
            assert read.aesthetic_score == sample.meta["aesthetic_score"]
            pixels = np.asarray(Image.open(io.BytesIO(sample.image)), np.float32)
            pixels = (pixels[:, ::-1] if turn else pixels).transpose(2, 0, 1) / 127.5 - 1
            assert read.masked is not None
            pairs = zip(read.masked.masks, read.masked.means, strict=True)
            for number, (mask, mean) in enumerate(pairs):
                whole = draw_mask(0, read.id, 3 * turn + number, (32, 32))
                np.testing.assert_array_equal(mask, whole[::4, ::4])
                seen = np.where(whole, 0, pixels)[None].astype(np.float32)
                expected = encoder.images(seen)[0][0]
                np.testing.assert_allclose(from_bfloat16(mean), expected, rtol=0.02, atol=5e-3)


@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_a_base_that_gains_them_predicts_what_it_did(
    family: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(f"tiny_{family}") / "unet"
    base = load_denoiser(folder)
    settings = Train(inpainting=True, aesthetic_score=True)
    more = load_denoiser(folder, config=trained_config(base.config, settings), seed=1)
    assert (
        ExtraInputs.from_config(more.config) == ExtraInputs(True, True)
        and ExtraInputs.from_config(base.config) == ExtraInputs()
    )
    latents, seen = torch.randn(2, 4, 8, 8), torch.randn(2, 5, 8, 8)
    given: dict[str, Any] = {
        "timestep": torch.tensor([3, 700]),
        "encoder_hidden_states": torch.randn(2, 6, base.config.cross_attention_dim),
    }
    if family == "sdxl":
        pooled = base.config.projection_class_embeddings_input_dim
        pooled -= 6 * base.config.addition_time_embed_dim
        given["added_cond_kwargs"] = {
            "text_embeds": torch.randn(2, pooled),
            "time_ids": torch.full((2, 6), 32.0),
        }
    scores = torch.tensor([5.0, 6.5])
    with torch.no_grad():
        expected = base(latents, **given).sample
        found = more(torch.cat([latents, seen], 1), class_labels=scores, **given).sample
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_base_that_has_them_keeps_its_weights(tiny_sd: Path, tmp_path: Path) -> None:
    settings = Train(inpainting=True, aesthetic_score=True)
    config = trained_config(Base.open(tiny_sd).denoiser, settings)
    saved = UNet2DConditionModel.from_config(config)
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.normal_()
    saved.save_pretrained(tmp_path)
    loaded = load_denoiser(tmp_path, config=trained_config(saved.config, settings), seed=1)
    for name, array in saved.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], array, rtol=0, atol=0)


def test_a_fresh_denoiser_may_be_given_them_by_its_config(tiny_sd: Path) -> None:
    base = Base.open(tiny_sd).denoiser
    settings = Train(init="random", inpainting=True, aesthetic_score=True)
    fresh = {**base, "in_channels": 9, "class_embed_type": "timestep"}
    assert ExtraInputs.from_config(trained_config(base, settings, fresh)) == ExtraInputs(True, True)
    with pytest.raises(Refused, match=r"in_channels is 5, the base's is 4"):
        trained_config(base, settings, {**base, "in_channels": 5})
    with pytest.raises(Refused, match="has classes of its own"):
        trained_config({**base, "num_class_embeds": 10}, settings)


def test_untrainable_settings_are_one_line_errors(tiny_sd: Path, tiny_sd3: Path) -> None:
    base = Base.open(tiny_sd).denoiser
    asked = Train(inpainting=True)
    nine = trained_config(base, asked)
    assert nine["in_channels"] == 9 and trained_config(nine, asked) == nine
    with pytest.raises(Refused, match=r"set train\.inpainting: true"):
        trained_config(nine, Train())
    with pytest.raises(Refused, match="adapters cannot add them"):
        trained_config(base, Train(aesthetic_score=True, method="lora"))
    with pytest.raises(Refused, match="is for UNets"):
        trained_config(Base.open(tiny_sd3).denoiser, asked)


def test_text_to_image_is_inpainting_of_everything(tiny_sd: Path, tmp_path: Path) -> None:
    """What evaluation draws is what diffusers' own inpainting pipeline draws of what we publish."""
    config = trained_config(Base.open(tiny_sd).denoiser, Train(inpainting=True))
    unet = load_denoiser(tiny_sd / "unet", config=config)
    torch.manual_seed(0)
    torch.nn.init.normal_(unet.conv_in.weight.data[:, 4:], std=0.2)
    unet.save_pretrained(tmp_path / "unet")
    assemble(Base.open(tiny_sd), {"unet": tmp_path / "unet"}, tmp_path / "out", dtype="float32")
    index = json.loads((tmp_path / "out" / "model_index.json").read_text())
    assert index["_class_name"] == "StableDiffusionInpaintPipeline"

    sampler = {"seed": 5, "num_inference_steps": 4, "guidance_scale": 3.0, "batch_size": 2}
    sampler |= {"height": None, "width": None}
    drawing = Sampler(Base.open(tmp_path / "out"), {}, open_device("cpu"))
    found = drawing.draw(["a cat", "a dog"], sampler, first=0)

    pipe = DiffusionPipeline.from_pretrained(tmp_path / "out", safety_checker=None)
    pipe.set_progress_bar_config(disable=True)
    rngs = [generator(5, Stream.PICTURE, number) for number in range(2)]
    start = np.stack([rng.standard_normal((4, 8, 8), dtype=np.float32) for rng in rngs])
    with torch.no_grad():
        grey = pipe.vae.encode(torch.zeros(1, 3, 32, 32)).latent_dist.mean
    expected = pipe(
        ["a cat", "a dog"],
        image=torch.zeros(2, 3, 32, 32),
        mask_image=torch.ones(2, 1, 32, 32),
        masked_image_latents=(grey * pipe.vae.config.scaling_factor).repeat(2, 1, 1, 1),
        height=32,
        width=32,
        strength=1.0,
        num_inference_steps=4,
        guidance_scale=3.0,
        latents=torch.from_numpy(start),
        output_type="np",
    ).images
    assert np.abs(found.astype(int) - (expected * 255).round().astype(int)).max() <= 1
    unet.conv_in.weight.data[:, 4:] = 0
    blind = Sampler(Base.open(tmp_path / "out"), {"unet": unet}, open_device("cpu"))
    assert (blind.draw(["a cat", "a dog"], sampler, first=0) != found).any()


def test_a_score_that_is_asked_for_reaches_the_picture(tiny_sdxl: Path) -> None:
    folder = tiny_sdxl / "unet"
    config = trained_config(read_config(folder / "config.json"), Train(aesthetic_score=True))
    unet = load_denoiser(folder, config=config)
    torch.manual_seed(0)
    torch.nn.init.normal_(unet.class_embedding.linear_2.weight.data, std=0.3)
    sampler: dict[str, Any] = {"seed": 5, "num_inference_steps": 3, "batch_size": 2}
    sampler |= {"height": None, "width": None, "negative_aesthetic_score": 2.5}
    drawing = Sampler(Base.open(tiny_sdxl), {"unet": unet}, open_device("cpu"))

    def draw(guidance: float, score: float, negative: float = 2.5) -> Any:
        given = {**sampler, "guidance_scale": guidance, "aesthetic_score": score}
        given["negative_aesthetic_score"] = negative
        return drawing.draw(["a cat"], given, first=0)

    assert (draw(3.0, 6.0) == draw(3.0, 6.0)).all()
    assert (draw(3.0, 6.0) != draw(3.0, 3.0)).any()
    assert (draw(3.0, 6.0) != draw(3.0, 6.0, 5.0)).any()
    assert (draw(1.0, 6.0) == draw(1.0, 6.0, 5.0)).all()  # without guidance there is no negative
    assert not unet._forward_pre_hooks


def test_a_base_without_input_layer_gets_no_weights_and_is_refused_later() -> None:
    assert added_weights({"time_embedding.linear_1.bias": np.zeros(4, np.float32)}, {}, 0) == {}
