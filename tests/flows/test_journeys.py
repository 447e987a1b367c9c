"""Whole runs of users, from every kind of source to a published model."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chips
import compiled_programs
import in_process
import numpy as np
import picture_sources
import published
import pytest
from kiln_command import ROOT, run_json
from PIL import Image
from safetensors.numpy import load_file
from toy_recipes import toy

from configs.load_recipe import load_recipe
from runtimes.adapters.lora_files import LORA_WEIGHTS
from tasks.download.folders import serve_folder

pytestmark = pytest.mark.slow
Overrides = dict[str, Any]
TinyModel = Callable[[str], Path]
SQUARE = dict.fromkeys(picture_sources.SHAPES, "8x8")
#: Latents of 32 x 32 pixels, of those as wide as these are, and as tall.
BUCKETS = {"wide": "6x10", "tall": "10x6", "square": "8x8"}


def everything_encoded(report: dict[str, Any]) -> published.Captions:
    return sum(
        (published.captions_encoded(report, split) for split in ("train", "holdout")),
        published.Captions(),
    )


def test_a_folder_with_captions_beside_its_pictures_is_published(
    tmp_path: Path, api: str, tiny_model: TinyModel, tiny_sdxl: Path
) -> None:
    """The README's recipe, with pictures of three aspect ratios and one of 4000 x 2 pixels."""
    pictures = [*picture_sources.make_pictures(), picture_sources.thin_picture()]
    picture_sources.write_folder(tmp_path / "pictures", pictures)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```yaml\n# mine\.yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(shown, encoding="utf-8")

    overrides = toy("sdxl-lora", tmp_path / "store", {}, tiny_model)
    del overrides["source"]
    overrides |= {"download.min_image_size": 0, "download.max_aspect_ratio": 10_000}
    report = in_process.finetune(tmp_path, str(tmp_path / "mine.yaml"), overrides, api)

    published.assert_published(report, "torch", 4)
    assert published.manifest(report, "download")["summary"]["outcomes"] == {"success": 19}
    page = (Path(report["model"]) / "report.html").read_text(encoding="utf-8")
    assert "Some of the pictures" in page and "Not shown" not in page
    encoded = published.manifest(report, "encode")["summary"]
    assert encoded["buckets"] == {"24x40": 7, "40x24": 6, "32x32": 6}
    assert encoded["captions"] == 19 and encoded["uncaptioned"] == 0
    assert everything_encoded(report) == published.captions_given(pictures, BUCKETS)
    mirrored = published.captions_encoded(report, "flipped")
    assert mirrored == published.captions_encoded(report, "train")
    prompt, adapters = "a drawing of a fox", Path(report["model"])
    drawn = published.draw(tiny_sdxl, prompt, lora=adapters)
    assert (drawn != published.draw(tiny_sdxl, prompt)).any()
    assert report["metrics"].keys() >= {"clip_score/new", "clip_score/old"}


@pytest.mark.soak
def test_tars_of_webdataset_are_published(tmp_path: Path, api: str, tiny_model: TinyModel) -> None:
    """Recipe sd2, from a range of tars whose captions are in their jsons."""
    pictures = picture_sources.make_pictures()
    picture_sources.write_tars(tmp_path / "tars", pictures)
    path = str(tmp_path / "tars/{00000..00002}.tar")
    source = {"kind": "tars", "path": path, "caption_column": "caption"}
    overrides = toy("sd2", tmp_path / "store", source, tiny_model)
    report = in_process.finetune(tmp_path, "sd2", overrides, api)

    published.assert_published(report, "torch", 4)
    assert published.manifest(report, "download")["summary"]["outcomes"] == {"success": 18}
    assert everything_encoded(report) == published.captions_given(pictures, SQUARE)


@pytest.mark.extended
def test_a_dataset_with_several_captions_a_picture_is_published(
    tmp_path: Path, api: str, tiny_model: TinyModel
) -> None:
    """Recipe sd2: one of the dataset's two splits, cropped to squares."""
    pictures = picture_sources.make_pictures(captions=3)
    picture_sources.write_dataset(tmp_path / "dataset", pictures)
    source = {"kind": "dataset", "path": str(tmp_path / "dataset")}
    overrides = toy("sd2", tmp_path / "store", source, tiny_model)
    overrides["train.best_checkpoint"] = {"metric": "clip_score"}
    report = in_process.finetune(tmp_path, "sd2", overrides, api)

    published.assert_published(report, "torch", 4)
    encoded = published.manifest(report, "encode")["summary"]
    assert encoded["buckets"] == {"32x32": 18} and encoded["captions"] == 54
    assert everything_encoded(report) == published.captions_given(pictures, SQUARE)
    published.assert_trained(report, tiny_model("least-sd"))
    published.assert_best_chosen(report, "clip_score")
    published.draw(Path(report["model"]), "a man with spiky yellow hair")
    chips.require("xla")
    assert_trained_by_xla(tmp_path, report, source, tiny_model)


def assert_trained_by_xla(
    tmp_path: Path, report: dict[str, Any], source: Overrides, tiny_model: TinyModel
) -> None:
    """Recipe sd2-v5p trains two steps on the latents of sd2; `soak` has its whole flow."""
    overrides = toy("sd2-v5p", tmp_path / "store", source, tiny_model)
    recipe = load_recipe("sd2-v5p", {**overrides, "train.steps": 2})
    with chips.standing_in("xla"):
        trained = published.train_apart(recipe, report, tmp_path / "xla")
    losses = [line["loss"] for line in published.history(trained)]
    assert recipe.runtime == "xla" and len(losses) == 2 and np.isfinite(losses).all()
    name = "unet/diffusion_pytorch_model.safetensors"
    ours, theirs = load_file(trained / name), load_file(published.folder(report, "train") / name)
    assert ours.keys() == theirs.keys()


@pytest.mark.soak
def test_a_list_of_urls_is_published_by_jax(
    tmp_path: Path, api: str, tiny_model: TinyModel
) -> None:
    """Recipe laion-jax, from scratch, on four virtual devices; one of the URLs leads nowhere."""
    pictures = picture_sources.make_pictures(captions=2)
    picture_sources.write_folder(tmp_path / "www", pictures)
    lost = picture_sources.Captioned("lost", "square", b"", ("never seen",))
    with serve_folder(tmp_path / "www", 0, lambda base, hosts: (base, hosts)) as (base, hosts):
        picture_sources.write_url_list(tmp_path / "list.parquet", [*pictures, lost], base)
        listed = load_recipe("laion-jax").source.model_dump()
        source = {**listed, "path": str(tmp_path / "list.parquet")}
        overrides = toy("laion-jax", tmp_path / "store", source, tiny_model)
        overrides["download.allow_hosts"] = list(hosts)
        overrides["train.best_checkpoint"] = {"mode": "max"}
        compiled_programs.keep(tmp_path / "store")
        with chips.standing_in("jax"):
            report = run_json(tmp_path, "laion-jax", overrides, api)

    published.assert_published(report, "jax", 4)
    outcomes = published.manifest(report, "download")["summary"]["outcomes"]
    assert outcomes.pop("success") == 18 and sum(outcomes.values()) == 1
    assert everything_encoded(report) == published.captions_given(pictures, SQUARE)
    published.assert_best_chosen(report, "validation_loss")
    assert published.manifest(report, "train")["summary"]["chosen_step"] == 2, "the loss falls"
    published.assert_trained(report, tiny_model("least-sd"))
    published.draw(Path(report["model"]), "a cat asleep on a windowsill")


@pytest.mark.soak
def test_adapters_of_denoiser_and_text_encoders_are_published_alone(
    tmp_path: Path, api: str, tiny_model: TinyModel, tiny_sdxl: Path
) -> None:
    """Recipe sdxl-lora-text, from a folder whose metadata.jsonl has several captions each."""
    pictures = picture_sources.make_pictures(captions=2)
    picture_sources.write_listed_folder(tmp_path / "pictures", pictures)
    source = {"kind": "folder", "path": str(tmp_path / "pictures")}
    overrides = toy("sdxl-lora-text", tmp_path / "store", source, tiny_model)
    report = in_process.finetune(tmp_path, "sdxl-lora-text", overrides, api)

    published.assert_published(report, "torch", 4)
    assert everything_encoded(report) == published.captions_given(pictures, BUCKETS)
    model = Path(report["model"])
    assert not (model / "unet").exists()
    trained = load_file(model / LORA_WEIGHTS)
    parts = {name.partition(".")[0] for name in trained}
    assert parts == {"unet", "text_encoder", "text_encoder_2"}
    unused = "text_encoder.text_model.encoder.layers.1."  # SDXL takes the states before its last
    moved = {name: array.any() for name, array in trained.items() if "lora_B" in name}
    assert {name for name in moved if name.startswith(unused)} == {n for n in moved if not moved[n]}
    from diffusers import StableDiffusionXLPipeline

    pipe = StableDiffusionXLPipeline.from_pretrained(tiny_sdxl)
    pipe.load_lora_weights(model)
    assert pipe.get_list_adapters().keys() == parts


@pytest.mark.extended
def test_adapters_are_published_merged_or_alone_and_draw_the_same(
    tmp_path: Path, api: str, small: Overrides
) -> None:
    """Recipe digits-lora with its gate, and samples of the champion."""
    overrides = {
        **small,
        "train.steps": 30,
        "train.global_batch_size": 8,
        "train.lr_warmup_steps": 2,
        "train.ema_decay": None,  # of so few steps it would be the base
        "train.checkpointing_steps": 15,
        "train.sample_every_n_steps": 15,
        "publish.gate": ["holdout_loss < base"],
    }
    merged = in_process.finetune(tmp_path, "digits-lora", overrides, api)
    assert merged["status"] == "published"
    (rule,) = json.loads((Path(merged["model"]) / "gate.json").read_text(encoding="utf-8"))
    assert rule["passed"]

    alone = in_process.finetune(tmp_path, "digits-lora", {**overrides, "publish.merge": False}, api)
    assert published.outcomes(alone) == published.expect("publish")
    assert alone["champion"]["version"] == "v2"

    base, prompt = ROOT / "demo/base", "a handwritten zero in white chalk on a green board"
    version, adapters = Path(merged["model"]), Path(alone["model"])
    assert (version / "unet").is_dir() and not (adapters / "unet").exists()
    before = published.draw(base, prompt)
    expected = published.draw(base, prompt, lora=adapters)
    assert np.abs(published.draw(base, prompt, lora=version / "lora") - expected).max() <= 1
    assert np.abs(published.draw(version, prompt) - expected).max() <= 4  # merged in float16
    assert np.abs(before - expected).max() > 16

    settings = {
        "seed": published.DRAWING["seed"],  # steps and guidance are those of the recipe
        "num_images_per_prompt": 1,
        "device": "cpu",
        "store": small["store"],
    }
    drawn = in_process.generate(tmp_path, "digits-lora", api, prompts=[prompt], settings=settings)
    (file,) = (drawn / "samples").iterdir()
    assert np.abs(np.asarray(Image.open(file)).astype(int) - expected).max() <= 1
