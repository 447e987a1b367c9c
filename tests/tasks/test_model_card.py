"""The model card: numbers, code, and hostile metadata of the base."""

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import long_captions
import numpy as np
import pytest
import yaml
from huggingface_hub import ModelCard

from configs.load_recipe import load_recipe
from configs.settings.data import Encode
from runtimes.adapters.lora_files import LORA_WEIGHTS
from runtimes.families import family_named
from runtimes.pipeline_folder.folder import Base
from tasks.evaluate.metrics import metric_rows
from tasks.publish.model_card import FOLDER, Weights, base_card, hub_id, training_facts, write_card
from tasks.trained_weights import TrainedWeights


def test_each_model_and_difference_has_its_own_column() -> None:
    measured = {
        "base": {"value": 5.0, "n": 10, "ci": [4.0, 6.0]},
        "tuned": {"value": 1.0, "n": 12, "ci": [0.5, 1.5]},
    }
    differences = {"cmmd": {"base": {"value": -4.0, "ci": [-4.5, -3.5]}}}
    metrics = {"cmmd": measured, "fd": {"tuned": measured["tuned"]}}
    names = ("metric", "base", "tuned", "tuned - base", "samples")
    assert metric_rows(metrics, differences) == [
        dict(zip(names, row, strict=True))
        for row in (
            ("cmmd", "5 [4, 6]", "1 [0.5, 1.5]", "-4 [-4.5, -3.5]", 12),
            ("fd", "—", "1 [0.5, 1.5]", "—", 12),
        )
    ]


def test_aliases_in_a_base_s_card_do_not_expand(tmp_path: Path) -> None:
    """Nine levels of ten aliases expand to a gigabyte of text."""
    levels = ["a0: &a0 lol"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    text = "\n".join(["---", *levels, "license: *a9", "license_name: x", "---", ""])
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    card = base_card(tmp_path)
    assert list(card) == ["license_name"]  # pytest would expand the aliases of a whole card
    assert card["license_name"] == "x"


@pytest.mark.parametrize("score", [True, False])
@pytest.mark.parametrize("inpainting", [True, False])
@pytest.mark.parametrize(
    "weights",
    [
        Weights(True),
        Weights(True, True),
        Weights(False, True),
        Weights(False, True, "DDIMScheduler", "fp16"),
        Weights(True, absent=("text_encoder_3", "tokenizer_3")),
        Weights(False, True, absent=("text_encoder_3", "tokenizer_3")),
    ],
)
def test_the_code_of_every_kind_of_card_is_python(
    weights: Weights, inpainting: bool, score: bool, tmp_path: Path
) -> None:
    weights = replace(weights, family=family_named("sdxl"), vae_variant="fp16")
    given = {"model.vae": "a/vae", "model.revision": "r2", "evaluate.dtype": "float16"}
    recipe = load_recipe("digits", given)
    train = recipe.train.model_copy(update={"inpainting": inpainting, "aesthetic_score": score})
    recipe = recipe.model_copy(update={"train": train})
    card = write_card(
        recipe, tmp_path, {"metrics": {}, "differences": {}}, [], {"images": "abc"}, weights
    )
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    ast.parse(code)
    assert ("mask_image=mask" in code) == inpainting
    assert ('kwargs | {"class_labels": scores.to(unet.device)}' in code) == score
    assert "torch_dtype=torch.float16)\n" in code, "as it was evaluated"
    assert ("revision='r2'" in code) == (not weights.pipeline)
    file = f", weight_name='{LORA_WEIGHTS}')"
    vae = "vae = AutoencoderKL.from_pretrained('a/vae', variant='fp16', torch_dtype="
    alone = [part in code for part in ("load_lora_weights", file, vae, ", vae=vae, ")]
    assert alone == [not weights.pipeline] * 4
    assert ("pipe.scheduler = DDIMScheduler.from_pretrained" in code) == bool(weights.scheduler)
    assert ("variant='fp16', vae=vae" in code) == bool(weights.variant)
    assert (", text_encoder_3=None, tokenizer_3=None, " in code) == bool(weights.absent)
    assert "\n\n\n" not in code and not code.endswith("\n\n")
    assert ("Adapters of rank 16" in card) == weights.adapters
    # A base that stores half precision does not draw without a dtype.
    assert ("Without `torch_dtype` diffusers" in card) == weights.pipeline
    folder = "lora/" if weights.pipeline else ""
    assert (f"| ComfyUI | `{folder}{LORA_WEIGHTS}` |" in card) == weights.adapters


USE = "copy it to `models/loras`, and add the node *Load LoRA*"
KOHYA = "`digits_kohya.safetensors`"


@pytest.mark.parametrize(
    ("family", "comfyui", "trainer"),
    [
        ("sd", KOHYA, "kohya's sd-scripts | {} | `--network_module networks.lora "),
        ("sdxl", KOHYA, "kohya's sd-scripts | {} | `--network_module networks.lora "),
        ("flux", KOHYA, "kohya's sd-scripts | {} | `--network_module networks.lora_flux "),
        ("flux2", KOHYA, "musubi-tuner | {} | `--network_module networks.lora_flux_2 "),
        (
            "z_image",
            f"`{LORA_WEIGHTS}`",
            "musubi-tuner | {} | `--network_module networks.lora_zimage ",
        ),
        ("qwen_image", KOHYA, "musubi-tuner | {} | `--network_module networks.lora_qwen_image "),
    ],
)
def test_the_card_has_each_family_s_files_and_trainers(
    family: str, comfyui: str, trainer: str, tmp_path: Path
) -> None:
    def table(**lora: object) -> list[str]:
        changes = {"train.method": "lora", **{f"train.lora.{n}": v for n, v in lora.items()}}
        given = (load_recipe("digits", changes), tmp_path, {"metrics": {}, "differences": {}}, [])
        weights = Weights(False, True, kohya=True, family=family_named(family))
        card = write_card(*given, {}, weights)
        rows = card.partition("| tool | file | use |\n|---|---|---|\n")[2].partition("\n\n")[0]
        return rows.splitlines()

    plain, linear, dora = table(), table(target_modules="linear"), table(dora=True)
    row = f"| {trainer.format(KOHYA)}--network_weights FILE`"
    invokeai = f"`{LORA_WEIGHTS}`" if family in ("flux2", "z_image") else KOHYA
    readers = [
        f"| ComfyUI | {comfyui} | {USE} |",
        f"| InvokeAI | {invokeai} | add it on the page *Models* |",
    ]
    assert plain == [*readers, f"{row} |"]
    ignored = "`final_layer`" if family == "flux" else "layers outside of blocks"
    assert linear == table(target_modules=["to_q"]) == [*readers, f"{row}; it ignores {ignored} |"]
    assert ("not with DoRA" in dora[0]) == (comfyui != KOHYA)
    assert "not with DoRA" in dora[1]


@pytest.mark.parametrize("weights", [Weights(True), Weights(False, True, "DDIMScheduler")])
def test_the_code_of_a_card_draws_with_the_scheduler_of_the_evaluation(
    weights: Weights, tmp_path: Path
) -> None:
    recipe = load_recipe("digits", {"evaluate.scheduler": "ddim"})
    card = write_card(recipe, tmp_path, {"metrics": {}, "differences": {}}, [], {}, weights)
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert "import DiffusionPipeline, DDIMScheduler\n" in code
    drawn = "pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config, clip_sample=False)"
    assert drawn in code
    ast.parse(code)
    euler = load_recipe("digits", {"evaluate.scheduler": "euler"})
    card = write_card(euler, tmp_path, {"metrics": {}, "differences": {}}, [], {}, weights)
    assert "EulerDiscreteScheduler.from_config(pipe.scheduler.config)" in card


def test_the_card_of_qwen_image_is_guided_as_the_evaluation(tmp_path: Path) -> None:
    recipe = load_recipe("qwen-image-lora")
    measured = {"metrics": {}, "differences": {}}
    scale = recipe.evaluate.guidance_scale
    plain, card = (
        write_card(
            *(recipe, tmp_path, measured, [], {}), Weights(False, True, family=family_named(name))
        )
        for name in ("sd", "qwen_image")
    )
    assert f"guidance_scale={scale}" in plain
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert f", true_cfg_scale={scale}, negative_prompt=''" in code
    assert "guidance_scale" not in code


def test_the_card_says_that_copies_of_held_out_pictures_may_be_in_training() -> None:
    name = "near-duplicates of held-out pictures"
    facts = training_facts({}, {}, Encode(leave_out_copies=False))
    assert facts[name] == "may be in training (encode.leave_out_copies: false)"
    assert name not in training_facts({}, {}, Encode(holdout=0.0)), "nothing is held out"


@pytest.mark.parametrize(
    ("weights", "relation"), [(Weights(True), "finetune"), (Weights(False, True), "adapter")]
)
def test_the_metadata_names_what_the_hub_knows(
    weights: Weights, relation: str, tmp_path: Path
) -> None:
    source = {"kind": "dataset", "path": "someone/pictures", "revision": "abc"}
    given = {"model.path": "some-lab/xl_base-1.0", "model.revision": "r2", "source": source}
    size = {"evaluate.height": 512, "evaluate.width": 768, "evaluate.true_cfg_scale": 3}
    recipe = load_recipe("sdxl", given | size)
    metrics = {"cmmd": {"tuned": {"value": 0.209143824, "n": 10, "ci": [0.2, 0.25]}}}
    run = {
        "device": "NVIDIA H100",
        "runtime": "torch",
        "seconds": 5400.0,
        "versions": {"torch": "2.13.0"},
    }
    measured = {"metrics": metrics, "differences": {}}
    summary = {"steps": 60, "chosen_step": 40, "chosen_because": "the lowest loss"}
    summary |= {"batches_left_out": 3, "copies_left_out": 7}
    facts = training_facts(run, summary, Encode())
    weights = replace(weights, caption_tokens=256)
    card = write_card(recipe, tmp_path, measured, [], {}, weights, facts)
    assert ", true_cfg_scale=3.0, negative_prompt='', height=512" in card
    assert ", height=512, width=768, max_sequence_length=256).images[0]" in card
    data = ModelCard(card).data
    assert (data.base_model, data.base_model_relation) == ("some-lab/xl_base-1.0", relation)
    assert data.datasets == ["someone/pictures"] and data.pipeline_tag == "text-to-image"
    (result,) = data.eval_results
    assert (result.metric_type, result.metric_value) == ("cmmd", 0.2091)
    assert "0.20914" not in card
    assert data.to_dict()["thumbnail"] == "before_after.png"
    assert "| checkpoint | step 40 of 60, the lowest loss |" in card
    assert "| batches left out after a divergence | 3 |" in card
    assert not any("batch" in name for name in training_facts(run, {"steps": 60}, Encode()))
    assert "checkpoint" not in training_facts(run, {"steps": 60}, Encode())
    assert "| near-duplicates of held-out pictures | 7 left out of training |" in card
    assert "| hardware | NVIDIA H100 |" in card and "| hours | 1.5 |" in card
    run |= {"cluster": "slurm", "hosts": 4, "processes": 8}
    shown = training_facts(run, {"steps": 60}, Encode())["hardware"]
    assert shown == "4 hosts of slurm, each with 8 processes: NVIDIA H100"
    assert "| base | some-lab/xl\\_base-1.0, revision r2 |" in card
    assert "co2" not in card, "no energy was measured"


@pytest.mark.parametrize("path", ["/models/base", "s3://bucket/base", "./a/b", "~/base", "models"])
def test_folders_and_urls_are_no_metadata_of_the_hub(path: str) -> None:
    assert hub_id(path) is None


def test_a_folder_with_the_name_of_a_hub_id_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_id("a/b") == "a/b"
    (tmp_path / "a/b").mkdir(parents=True)
    assert hub_id("a/b") is None


@pytest.mark.parametrize(
    ("path", "name", "shown"),
    [
        ("{folder}/tiny", "tiny", "tiny, sha256 abcdefabcdef…"),
        ("s3://bucket/tiny", "s3://bucket/tiny", "s3:&#47;&#47;bucket/tiny"),
        ("lab/tiny", "lab/tiny", "lab/tiny"),
    ],
)
def test_the_base_has_a_name_that_other_machines_know(
    path: str, name: str, shown: str, tmp_path: Path
) -> None:
    base = path.format(folder=tmp_path)
    given = {"model.path": base, "evaluate.clip": f"{base}/evaluator", "store": f"{base}-store"}
    given["model.vae"] = f"{tmp_path}/vaes/fixed"
    given |= {"source": {"kind": "folder", "path": f"{tmp_path}/pictures"}}
    recipe = load_recipe("digits", given)
    facts = {"hardware": "cpu"}
    measured = {"metrics": {}, "differences": {}}
    lineage = {"base": "abcdef" * 10}
    card = write_card(recipe, tmp_path, measured, [], lineage, Weights(False, True), facts)
    assert f"| base | {shown} |" in card and "| source | folder, pictures |" in card
    assert str(tmp_path) not in card
    settings = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", card, re.DOTALL)[0])
    assert (settings["model"]["path"], settings["model"]["vae"]) == (name, "fixed")
    assert settings["evaluate"]["clip"] == f"{name}/evaluator"
    beside = settings["store"]
    assert beside == ("tiny-store" if name == "tiny" else f"{base}-store"), "a folder beside it"
    code = f"from_pretrained('{'path/to/' if name == 'tiny' else ''}{name}', "
    assert code in card


def test_kept_columns_of_the_source_are_a_table_and_hostile_text_stays_text(tmp_path: Path) -> None:
    recipe = load_recipe("digits")
    given = (recipe, tmp_path, {"metrics": {}, "differences": {}}, [], {}, Weights(True))
    facts = {"pictures with a value": 7, "values": "3 distinct"}
    columns = [{"column": name, **facts} for name in ("licence", "[x](javascript:1)|")]
    card = write_card(*given, columns=columns)
    assert "\n## Data\n\n| column | pictures with a value | values |\n" in card
    assert "| licence | 7 | 3 distinct |" in card and "](javascript" not in card
    assert "## Data" not in write_card(*given)


def test_a_card_names_a_checkpoint_file_by_its_digest_and_both_bases(tmp_path: Path) -> None:
    """And what training was given: names without the folders of this machine."""
    given = {
        "model.path": "/home/me/pony.safetensors",
        "train.method": "lora",
        "train.lora.assistant": "/home/me/undistill.safetensors",
        "evaluate.model": {"path": "/home/me/turbo", "num_inference_steps": 4},
    }
    (tmp_path / "single_file.json").write_text('{"checkpoint": "abc123"}')
    measured = {"metrics": {}, "differences": {}}
    weights = Weights(False, adapters=True)
    card = write_card(
        load_recipe("digits", given), tmp_path, measured, [], {}, weights, {"device": "cpu"}
    )
    assert "| base | pony.safetensors, sha256 abc123 |" in card
    assert "from_pretrained('path/to/pony'" in card and "base_model:" not in card
    assert "| assistant, in no file here | undistill.safetensors |" in card
    assert "the adapters on turbo, drawn in\n4 steps" in card
    assert "/home/me" not in card


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-sd", "tiny-sdxl"])
def test_the_code_of_a_card_encodes_a_long_prompt_as_training_does(
    name: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    prompt = "a quick brown fox " * 8
    sets = {"new": {"prompts": [prompt]}}
    sizes = {"height": 32, "width": 32, "num_inference_steps": 2, "prompts": sets}
    recipe = load_recipe("digits", {f"evaluate.{name}": value for name, value in sizes.items()})
    base = Base.open(tiny_model(name), max_tokens=225)
    weights = Weights.of(TrainedWeights(), base, tmp_path, merged=False)
    card = write_card(recipe, tmp_path, {"metrics": {}, "differences": {}}, [], {}, weights)
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.replace(repr(FOLDER), repr(str(base.folder))), names)
    assert names["image"].size == (32, 32)
    for prefix, text in (("", prompt), ("negative_", "")):
        states, pooled = long_captions.encode(base.folder, [(text, 1.0)], 3)
        is_zero = bool(prefix) and base.encoders["empty_prompt"] == "zeros"
        expected = 0 * states if is_zero else states
        np.testing.assert_allclose(names[f"{prefix}prompt_embeds"][0], expected, atol=1e-5)
        if pooled is not None:
            expected = 0 * pooled if is_zero else pooled
            found = names[f"{prefix}pooled_prompt_embeds"][0]
            np.testing.assert_allclose(found, expected, atol=1e-5)
