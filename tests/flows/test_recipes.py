"""Every shipped recipe, with all that it says but for sizes, runs on the runtime that it names.

Here is what repeats others: runs of sd2 (and training of sd2-v5p), sdxl, sdxl-lora-text, laion-jax
and digits-lora are in test_journeys.py, that of digits in test_finetune.py.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chips
import in_process
import picture_sources
import published
import pytest
from kiln_command import run_json
from toy_recipes import BASES, toy

from demo.make_base import make_base
from demo.make_flow_base import make_flow_base
from runtimes.adapters.lora_files import LORA_WEIGHTS

pytestmark = pytest.mark.soak
TinyModel = Callable[[str], Path]
PICTURES = 18


def run(name: str, tmp_path: Path, api: str, tiny_model: TinyModel, **more: Any) -> dict[str, Any]:
    """The report of a toy run on a dataset."""
    pictures = picture_sources.make_pictures(PICTURES)
    picture_sources.write_dataset(tmp_path / "dataset", pictures)
    source = {"kind": "dataset", "path": str(tmp_path / "dataset")}
    overrides = {**toy(name, tmp_path / "store", source, tiny_model), **more}
    return in_process.finetune(tmp_path, name, overrides, api)


@pytest.mark.parametrize(
    "name",
    [
        *("sdxl-lora", "sd35-lora", "flux-lora", "flux-schnell", "flux2-klein"),
        *("z-image-lora", "qwen-image-lora"),
    ],
)
def test_a_recipe_of_adapters_is_published(
    name: str, tmp_path: Path, api: str, tiny_model: TinyModel
) -> None:
    report = run(name, tmp_path, api, tiny_model)
    published.assert_published(report, "torch", 4)
    assert (Path(report["model"]) / LORA_WEIGHTS).is_file()


@pytest.mark.parametrize("name", ["sd2-v5p", "sdxl-v5p"])
def test_a_recipe_for_tpus_is_published(
    name: str, tmp_path: Path, api: str, tiny_model: TinyModel
) -> None:
    """On four virtual devices of the CPU."""
    chips.require("xla")
    with chips.standing_in("xla"):
        report = run(name, tmp_path, api, tiny_model)
    published.assert_published(report, "xla", 4)
    published.assert_trained(report, tiny_model(BASES[name]))
    published.draw(Path(report["model"]), "a masked ninja standing in the rain")


def test_a_recipe_is_published_on_gaudi(tmp_path: Path, api: str, tiny_model: TinyModel) -> None:
    """Recipe sd2 on the emulated device, from encoding to sampling."""
    chips.require("hpu-lazy")
    picture_sources.write_dataset(tmp_path / "dataset", picture_sources.make_pictures(PICTURES))
    source = {"kind": "dataset", "path": str(tmp_path / "dataset")}
    overrides = toy("sd2", tmp_path / "store", source, tiny_model)
    overrides |= {f"{stage}.device": "hpu" for stage in ("encode", "train", "evaluate")}
    with chips.standing_in("hpu-lazy"):
        report = run_json(tmp_path, "sd2", overrides, api)
    published.assert_published(report, "torch", 4)
    assert published.manifest(report, "train")["run"]["device"].startswith("hpu")
    published.assert_trained(report, tiny_model(BASES["sd2"]))


def test_the_base_of_the_demo_is_remade_from_random_weights(
    tmp_path: Path, api: str, small: dict[str, Any]
) -> None:
    """By the commands of its card, and draws with its new UNet."""
    base = tmp_path / "base"
    make_base(base, clip_steps=2, vae_steps=2)
    remade = {"model.path": str(base), "evaluate.clip": str(base / "evaluator")}
    pictures = {"source.count": 0, "source.rehearsal": 60, "train.lr_warmup_steps": 1}
    report = in_process.finetune(tmp_path, "digits-base", {**small, **remade, **pictures}, api)
    published.assert_published(report, "torch", 6)
    published.assert_trained(report, base)
    shutil.copytree(Path(report["model"]) / "unet", base / "unet", dirs_exist_ok=True)
    published.draw(base, "a handwritten seven in red ink on white paper")


def test_the_flow_base_of_the_demo_is_remade_and_fine_tuned(
    tmp_path: Path, api: str, small: dict[str, Any]
) -> None:
    """By the commands of its card; the smoke test of the published FLUX is on."""
    base = tmp_path / "base"
    make_flow_base(base, t5_steps=2)
    given = {**small, "model.path": str(base), "train.lr_warmup_steps": 1}
    given |= {"publish.smoke_test": True}
    pictures = {"source.count": 0, "source.rehearsal": 60}
    report = in_process.finetune(tmp_path, "digits-flow-base", {**given, **pictures}, api)
    published.assert_published(report, "torch", 6)
    published.assert_trained(report, base, "transformer")
    trained = Path(report["model"]) / "transformer"
    shutil.copytree(trained, base / "transformer", dirs_exist_ok=True)
    report = in_process.finetune(tmp_path, "digits-flow", given, api)
    published.assert_published(report, "torch", 6)
    published.assert_trained(report, base, "transformer")
