"""`kiln import`: recipes of other tools' configurations plan, and run to a published model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kiln_command import kiln
from picture_sources import make_pictures, write_folder
from published import manifest
from toy_recipes import OPEN_GATE, REDUCED

from artifacts.store import Store
from configs.load_recipe import parse_yaml

pytestmark = pytest.mark.slow

#: What makes an imported recipe small.
SMALL: dict[str, Any] = {
    **REDUCED,
    **OPEN_GATE,
    "download.min_image_size": 16,
    "encode.holdout": 0,
    "train.checkpointing_steps": 2,
    "evaluate.height": 32,
    "evaluate.width": 32,
    "evaluate.num_inference_steps": 2,
    "evaluate.prompts.new.images_per_prompt": 1,
    "evaluate.prompts.old.images_per_prompt": 1,
}
Run = Callable[..., dict[str, Any]]


def write_kohya(folder: Path, base: Path) -> list[str]:
    """A dataset TOML of three subsets, one of class pictures, and a training TOML."""
    pictures = make_pictures(12)
    write_folder(folder / "10_sks dog", pictures[:4])
    write_folder(folder / "style", pictures[4:8])
    write_folder(folder / "dog", pictures[8:])
    subsets = [
        {"image_dir": str(folder / "10_sks dog"), "num_repeats": 10},
        {"image_dir": str(folder / "style"), "shuffle_caption": True},
        {"image_dir": str(folder / "dog"), "is_reg": True},
    ]
    lines = ["[general]", 'caption_extension = ".txt"', "color_aug = true", "[[datasets]]"]
    lines += ["resolution = 32", "batch_size = 4"]
    for subset in subsets:
        lines += ["[[datasets.subsets]]", *(f"{n} = {json.dumps(v)}" for n, v in subset.items())]
    (folder / "dataset.toml").write_text("\n".join(lines), encoding="utf-8")
    training = {
        "pretrained_model_name_or_path": str(base),
        "network_module": "networks.lora",
        "network_dim": 4,
        "network_train_unet_only": True,
        "max_train_steps": 4,
        "learning_rate": 1e-4,
        "sample_prompts": str(folder / "prompts.txt"),
        "clip_skip": 2,
    }
    (folder / "prompts.txt").write_text("a sks dog --w 512\n", encoding="utf-8")
    text = "\n".join(f"{name} = {json.dumps(value)}" for name, value in training.items())
    (folder / "train.toml").write_text(text, encoding="utf-8")
    return ["kohya", str(folder / "dataset.toml"), str(folder / "train.toml")]


def write_dreambooth(folder: Path, base: Path) -> list[str]:
    """The words of a DreamBooth command line with prior preservation."""
    write_folder(folder / "dog", make_pictures(4))
    given = {
        "pretrained_model_name_or_path": base,
        "instance_data_dir": folder / "dog",
        "instance_prompt": "a photo of sks dog",
        "class_data_dir": folder / "none",
        "class_prompt": "a photo of dog",
        "num_class_images": 3,
        "resolution": 32,
        "train_batch_size": 2,
        "max_train_steps": 4,
        "lr_warmup_steps": 0,
        "output_dir": folder / "dog-lora",
    }
    options = [f"--{name}={value}" for name, value in given.items()]
    script = "train_dreambooth_lora_sdxl.py"
    return ["diffusers", "accelerate", "launch", script, "--with_prior_preservation", *options]


@pytest.mark.extended
@pytest.mark.parametrize(
    "write", [write_kohya, pytest.param(write_dreambooth, marks=pytest.mark.soak)]
)
def test_an_imported_recipe_plans_and_runs_to_a_published_model(
    write: Callable[[Path, Path], list[str]],
    here: Callable[..., str],
    run_here: Run,
    tiny_sdxl: Path,
    tiny_clip: Path,
    tmp_path: Path,
) -> None:
    file = tmp_path / "imported.yaml"
    here("import", *write(tmp_path, tiny_sdxl), "--output", str(file))
    recipe = parse_yaml(file.read_text(encoding="utf-8"))
    given = {**SMALL, "store": str(tmp_path / "store"), "evaluate.clip": str(tiny_clip)}
    assert "fits" in here("plan", str(file), "--gpu", "24GB", overrides=given)
    report = run_here(str(file), given)
    assert report["status"] == "published"
    sources = manifest(report, "encode")["summary"]["sources"]
    assert sources.keys() == recipe["sources"].keys()
    if write is write_dreambooth:
        assert sources["class"]["samples"] == 3
        store = Store(str(given["store"]))
        assert [stage for stage, _ in store.artifact_keys()].count("drawn") == 1
        card = Path(report["model"], "README.md").read_text(encoding="utf-8")
        assert "3 pictures drawn by the base" in card


def test_what_has_no_equivalent_is_on_stderr_and_in_the_recipe(tmp_path: Path) -> None:
    words = ["--dataset_name=a/b", "--pretrained_model_name_or_path=c/d", "--sparkle=3"]
    command = ["import", "diffusers", "train_text_to_image_lora.py", "--hub_token=hf_me", *words]
    recipe = kiln(tmp_path, *command)
    assert "#   sparkle (3): unknown setting" in recipe and "there are" not in recipe
    assert "--hub_token=... " in recipe and "hub_token (...): " in recipe and "hf_me" not in recipe
    assert parse_yaml(recipe)["source"] == {"kind": "dataset", "path": "a/b"}
    refused = kiln(tmp_path, "import", "diffusers", "train.py", code=2)
    assert refused.startswith("kiln: diffusers: train: ") and refused.count("\n") == 1
