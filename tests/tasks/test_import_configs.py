"""Recipes of other tools' configurations: what is translated, and what is only named."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs.errors import Refused
from configs.explain_errors import TABLE
from configs.load_recipe import parse_yaml
from configs.settings.base_section import Section, settings_of
from configs.settings.recipe import Recipe
from tasks.imports import diffusers, kohya, simpletuner
from tasks.imports.translation import RULES, Translation

#: Settings that are values.
SETTINGS = {
    name: field
    for name, field in settings_of(Recipe)
    if not (isinstance(field.annotation, type) and issubclass(field.annotation, Section))
}
TOOLS: dict[str, Any] = {"D": diffusers, "K": kohya, "S": simpletuner}
DREAMBOOTH = """accelerate launch --num_processes 2 train_dreambooth_lora.py \\
  --pretrained_model_name_or_path=runwayml/stable-diffusion-v1-5 --instance_data_dir=dog \\
  --instance_prompt="a photo of sks dog" --class_data_dir=class --class_prompt="a photo of dog" \\
  --with_prior_preservation --prior_loss_weight=0.5 --num_class_images=12 --train_batch_size=1 \\
  --gradient_accumulation_steps=2 --learning_rate=1e-4 --lr_scheduler=constant_with_warmup \\
  --lr_warmup_steps=0 --max_train_steps=400 --mixed_precision=fp16 --center_crop --scale_lr"""


def recipe_of(translation: Translation) -> dict[str, Any]:
    """The valid recipe, read back from its text."""
    settings: dict[str, Any] = parse_yaml(translation.text("a test"))
    Recipe.model_validate(settings)
    return settings


def section(settings: dict[str, Any], *names: str) -> list[Any]:
    return [settings.get(name) for name in names]


@pytest.fixture
def subsets(tmp_path: Path) -> Path:
    """A dataset TOML of three subsets: two to learn, one of class pictures."""
    for folder in ("10_sks dog", "style", "1_dog"):
        (tmp_path / folder).mkdir()
    (tmp_path / "style/1.txt").write_text("a hill, watercolour", encoding="utf-8")
    file = tmp_path / "dataset.toml"
    file.write_text(
        f"""
        [general]
        caption_extension = ".txt"
        flip_aug = true
        color_aug = true
        [[datasets]]
        resolution = 512
        batch_size = 4
        enable_bucket = true
        max_bucket_reso = 768
        [[datasets.subsets]]
        image_dir = '{tmp_path}/10_sks dog'
        class_tokens = 'sks dog'
        num_repeats = 10
        [[datasets.subsets]]
        image_dir = '{tmp_path}/style'
        caption_dropout_rate = 0.1
        wildcat = 1
        [[datasets.subsets]]
        image_dir = '{tmp_path}/1_dog'
        class_tokens = 'dog'
        is_reg = true
        """,
        encoding="utf-8",
    )
    return file


@pytest.mark.parametrize(
    ("tool", "name"),
    [(tool, name) for f in TABLE for tool in f.tools if tool in TOOLS for name in f.names.split()],
)
def test_each_name_of_the_table_has_a_rule_or_is_one_of_our_settings(tool: str, name: str) -> None:
    translation = Translation(tool, {name: "1"}, TOOLS[tool].RULES)
    ours = next(f.ours for f in TABLE if tool in f.tools and name in f.names.split())
    if name not in TOOLS[tool].RULES and name not in RULES:
        translation.translate([name])
        assert translation.remarks or ours in SETTINGS


def test_subsets_of_kohya_are_sources(subsets: Path) -> None:
    training = "--pretrained_model_name_or_path base --network_dim=8 --network_train_unet_only"
    words = [str(subsets), *f"sdxl_train_network.py {training} --prior_loss_weight 0.7".split()]
    translation = kohya.read(words)
    recipe = recipe_of(translation)
    dog, style, klass = recipe["sources"].values()
    assert [*recipe["sources"]] == ["sks_dog", "style", "dog"]
    assert dog["repeats"] == 10 and "repeats" not in style
    assert dog["encode"] == {"captions": {"prompts": ["sks dog"]}}
    assert style["caption_dropout_rate"] == 0.1 and "encode" not in style  # it has captions
    assert section(klass, "regularisation", "loss_weight") == ["images", 0.7]
    shared = section(recipe["encode"], "resolution", "aspect_buckets", "max_aspect", "flip")
    assert shared == [512, True, 2.25, True]
    lora = recipe["train"]["lora"]
    assert section(lora, "rank", "alpha", "target_modules") == [8, 1, "linear"]
    assert section(recipe["train"], "steps", "global_batch_size") == [1600, 4]
    assert recipe["evaluate"]["prompts"]["old"]["prompts"] == ["dog"]
    assert any(line.startswith("color_aug") for line in translation.remarks)
    assert "wildcat (1): unknown setting of a subset" in translation.remarks


def test_kohyas_rectangle_split_and_weights_fit_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "1_cat").mkdir()
    words = "train_network.py --pretrained_model_name_or_path b --network_dim=8 --weighted_captions"
    given = f"{words} --validation_split=0.1 --resolution=512,768"
    translation = kohya.read([str(tmp_path), *given.split()])
    encode = recipe_of(translation)["encode"]
    assert section(encode, "resolution", "holdout", "text") == [624, 0.1, "token_ids"]
    assert "weighted_captions (true): text, since" in "\n".join(translation.remarks)
    alone = kohya.read([str(tmp_path), *f"{given} --network_train_unet_only".split()])
    assert recipe_of(alone)["encode"]["captions"]["emphasis"] == "weights"


def test_folders_named_as_kohyas_are_sources(tmp_path: Path) -> None:
    for folder in ("train/3_sks cat", "train/notes", "reg/1_cat"):
        (tmp_path / folder).mkdir(parents=True)
    words = f"train_network.py --pretrained_model_name_or_path b --reg_data_dir {tmp_path}/reg"
    launched = f"accelerate launch --num_processes 2 --config_file a.yaml {words}"
    translation = kohya.read([str(tmp_path / "train"), *launched.split()])
    recipe = recipe_of(translation)
    assert recipe["train"]["processes"] == 2
    assert 'accelerate_config_file ("a.yaml"): unknown setting' in "\n".join(translation.remarks)
    assert [(n, s.get("repeats")) for n, s in recipe["sources"].items()] == [
        ("sks_cat", 3),
        ("cat", None),
    ]
    assert recipe["sources"]["cat"]["regularisation"] == "images"
    assert section(recipe["train"], "train_text_encoder") == [True]  # as kohya does of SD and SDXL
    with pytest.raises(Refused, match="such as `10_sks dog`"):
        kohya.read([str(tmp_path)])


def test_training_settings_of_kohya_have_our_names_and_the_rest_is_named(subsets: Path) -> None:
    training = subsets.with_name("train.toml")
    training.write_text(
        """
        [model]
        pretrained_model_name_or_path = "base"
        [optimizer]
        optimizer_type = "AdamW8bit"
        optimizer_args = ["weight_decay=0.1", "betas=0.9,0.95", "amsgrad=True"]
        lr_scheduler = "constant_with_warmup"
        lr_warmup_steps = 0.1
        max_train_steps = 500
        gradient_checkpointing = true
        mixed_precision = "fp16"
        v_parameterization = true
        clip_skip = 2
        bucket_no_upscale = true
        sparkle = 3
        """,
        encoding="utf-8",
    )
    translation = kohya.read([str(subsets), str(training)])
    train = recipe_of(translation)["train"]
    names = ("optimizer", "weight_decay", "adam_betas", "lr_scheduler", "lr_warmup_steps")
    assert section(train, *names) == ["adamw_8bit", 0.1, [0.9, 0.95], "constant", 50]
    names = ("gradient_checkpointing", "mixed_precision", "prediction_type")
    assert section(train, *names) == ["blocks", "bf16", "v_prediction"]
    named = {line.partition(" ")[0].rstrip(":") for line in translation.remarks}
    assert {"optimizer_args", "mixed_precision", "clip_skip", "bucket_no_upscale"} <= named
    assert "sparkle (3): unknown setting" in "\n".join(translation.remarks)
    assert all(f"#   {line}" in translation.text("here") for line in translation.remarks)


def test_prior_preservation_of_diffusers_draws_the_pictures_of_the_class() -> None:
    translation = diffusers.read([DREAMBOOTH])
    recipe = recipe_of(translation)
    drawn = {"kind": "drawn", "prompts": ["a photo of dog"], "count": 12}
    klass = {"source": drawn, "regularisation": "images", "loss_weight": 0.5}
    assert recipe["sources"]["class"] == klass
    instance = recipe["sources"]["instance"]
    assert instance["encode"] == {"captions": {"prompts": ["a photo of sks dog"]}}
    assert instance["source"]["path"].endswith("/dog")
    # Each sample has a picture of the class beside it; two processes, two micro-batches.
    names = ("global_batch_size", "micro_batch_size", "steps", "method", "lr_scheduler")
    assert section(recipe["train"], *names) == [8, 2, 400, "lora", "constant"]
    assert recipe["encode"]["crop"] == "center"
    assert [line.split()[0] for line in translation.remarks] == ["mixed_precision", "scale_lr"]


def test_class_pictures_that_are_there_are_not_drawn(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"{number}.png").touch()
    command = DREAMBOOTH.replace("--class_data_dir=class", f"--class_data_dir={tmp_path}")
    klass = recipe_of(diffusers.read([command]))["sources"]["class"]
    assert klass["source"] == {"kind": "folder", "path": str(tmp_path)}


def test_a_shell_script_has_the_values_of_its_variables(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        'export MODEL_NAME="some/base"\n# a comment\naccelerate launch train_text_to_image.py \\\n'
        "  --pretrained_model_name_or_path=$MODEL_NAME \\\n  --dataset_name=some/pictures \\\n"
        '  --validation_prompts "a fox" "a hen" --use_ema --num_train_epochs 3\n',
        encoding="utf-8",
    )
    recipe = recipe_of(diffusers.read([str(script)]))
    assert recipe["model"]["path"] == "some/base"
    assert recipe["source"] == {"kind": "dataset", "path": "some/pictures"}
    assert recipe["evaluate"]["prompts"]["new"]["prompts"] == ["a fox", "a hen"]
    assert section(recipe["train"], "epochs", "ema_decay", "global_batch_size") == [3, 0.9999, 16]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train_controlnet.py", "train_controlnet: the command line of train_text_to_image"),
        ("train_dreambooth_inpaint.py", "its training step has no equivalent"),
        ("train_dreambooth.py --instance_data_dir dog", "needs --instance_prompt"),
        ("train_text_to_image.py --resolution wide", "resolution: 'wide' is not a value"),
    ],
)
def test_other_scripts_and_missing_prompts_are_refused(command: str, words: str) -> None:
    with pytest.raises(Refused, match=words):
        diffusers.read(command.split())


def test_prompts_that_cannot_be_read_are_named(subsets: Path) -> None:
    command = "train_network.py --pretrained_model_name_or_path b --sample_prompts /no/prompts.txt"
    with pytest.raises(Refused, match=r"^/no/prompts\.txt: it cannot be read"):
        kohya.read([str(subsets), *command.split()])


def test_no_configuration_and_no_base_are_told(subsets: Path) -> None:
    with pytest.raises(Refused, match=r"^nowhere: it is no TOML, folder or command line"):
        kohya.read(["nowhere"])
    with pytest.raises(Refused, match="base model is missing: add pretrained_model_name_or_path"):
        kohya.read([str(subsets)]).text("kohya")


def test_backends_of_simpletuner_are_sources(tmp_path: Path) -> None:
    config = {
        "--model_type": "lora",
        "--model_family": "sdxl",
        "--lora_rank": "16",
        "--base_model_precision": "int8-quanto",
        "--train_batch_size": 2,
        "--learning_rate": "1e-4",
        "--max_train_steps": 300,
        "--mixed_precision": "bf16",
        "--validation_prompt": "a fox",
        "--user_prompt_library": "library.json",
    }
    backends = [
        {"id": "fox", "type": "local", "instance_data_dir": "fox", "repeats": 9, "crop": True}
        | {"caption_strategy": "instanceprompt", "instance_prompt": "a fox"}
        | {"resolution": 1.0, "resolution_type": "area"},
        {"id": "old", "type": "local", "instance_data_dir": "old", "crop": True}
        | {"is_regularisation_data": True, "resolution": 1024, "sparkle": 1},
        {"id": "texts", "dataset_type": "text_embeds"},
    ]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "multidatabackend.json").write_text(json.dumps(backends), encoding="utf-8")
    translation = simpletuner.read(str(tmp_path))
    recipe = recipe_of(translation)
    assert recipe["sources"]["fox"]["repeats"] == 10  # theirs are further passes
    assert recipe["sources"]["old"]["regularisation"] == "prior"
    assert recipe["encode"]["resolution"] == 1024
    assert section(recipe["train"]["lora"], "rank", "base_precision") == [16, "int8"]
    assert section(recipe["train"], "steps", "learning_rate") == [300, 1e-4]
    named = "\n".join(translation.remarks)
    assert "user_prompt_library" in named and "sparkle (1) of old: no equivalent" in named
