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
import numpy as np
import picture_sources
import published
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kiln_command import run_json
from numpy.typing import NDArray
from PIL import Image
from toy_recipes import BASES, toy

from demo import dataset
from demo.captions import BASE_STYLES, NEW_STYLE
from demo.digit_judges import _classifier, ink_shape
from demo.make_base import make_base
from demo.make_flow_base import make_flow_base
from runtimes.adapters.lora_files import LORA_WEIGHTS
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import Drawing, Events, GenerateJob
from runtimes.sample.generate_job import generate

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


@pytest.mark.parametrize("name", ["kontext-lora", "flux2-klein-edit-lora", "qwen-image-edit-lora"])
def test_a_recipe_of_an_edit_model_is_published(
    name: str, tmp_path: Path, api: str, tiny_model: TinyModel
) -> None:
    """Two targets share a reference; held-out samples are drawn and judged with theirs."""
    pictures = picture_sources.make_pictures(2 * PICTURES)
    before = [picture.png for picture in pictures[PICTURES:]]
    columns = {
        "target_img": [picture.png for picture in pictures[:PICTURES]],
        "instruction": [picture.captions[0] for picture in pictures[:PICTURES]],
        "source_img": [before[number // 2] for number in range(PICTURES)],
    }
    pq.write_table(pa.table(columns), tmp_path / "train-00000-of-00001.parquet")
    overrides = toy(name, tmp_path / "store", {}, tiny_model)
    overrides |= {"source.path": str(tmp_path), "evaluate.image_encoder": None}
    overrides |= {"evaluate.prompts.edit.held_out": 3, "train.sample_every_n_steps": 0}
    del overrides["source"]
    report = in_process.finetune(tmp_path, name, overrides, api)
    published.assert_published(report, "torch", 4)
    assert report["metrics"]["reference_similarity/edit"]["tuned"]["n"] == 3
    assert report["metrics"]["target_similarity/edit"]["base"]["n"] == 3


def test_the_demo_of_an_edit_model_follows_its_reference(tmp_path: Path, api: str) -> None:
    """The whole recipe. Other references with equal prompt and noise give other digits."""
    report = in_process.finetune(tmp_path, "digits-edit", {"store": str(tmp_path / "store")}, api)
    assert report["status"] == "published"
    shown = digits_by_reference(Path(report["model"]), tmp_path)
    assert (shown["asked"] == shown["first"]).mean() >= 0.95
    assert (shown["swapped"] == shown["second"]).mean() >= 0.95


def digits_by_reference(model: Path, folder: Path) -> dict[str, NDArray[Any]]:
    """Digits in references of held-out handwriting, and in pictures of the same noise and prompt.

    "asked" has the references "first", "swapped" those of another digit, "second".
    """
    x8, labels = dataset.load("held_out")
    rows = np.concatenate([np.flatnonzero(labels == digit)[:5] for digit in range(10)])
    ink = np.arange(len(rows)) % len(BASE_STYLES)
    references = dataset.render(x8[rows], ink, np.random.default_rng(9))
    paths = [folder / f"reference-{number}.png" for number in range(len(rows))]
    for path, picture in zip(paths, references, strict=True):
        Image.fromarray(picture).save(path)
    base = Base.open(model)
    prompt = f"the same digit in {NEW_STYLE}"
    seen = {}
    turned = np.roll(np.arange(len(rows)), 5)  # the references of the next digit
    for name, order in (("asked", np.arange(len(rows))), ("swapped", turned)):
        out = folder / name
        job = GenerateJob(
            runtime="torch",
            **base.job_fields,
            drawings=(Drawing(str(out)),),
            prompts=(prompt,) * len(rows),
            sampler={
                **dict.fromkeys(("scheduler", "negative_prompt")),
                **{"seed": 3, "num_inference_steps": 20, "guidance_scale": 1.0},
                **{"height": 32, "width": 32, "batch_size": 25},
            },
            device="cpu",
            references=tuple((str(paths[number]),) for number in order),
            reference_step=8,
        )
        generate(job, Events())
        pictures = [np.asarray(Image.open(out / f"{n:05d}.png")) for n in range(len(rows))]
        seen[name] = _classifier().predict(ink_shape(np.stack(pictures)))
    return seen | {"first": labels[rows], "second": labels[rows][turned]}


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
