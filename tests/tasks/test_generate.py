"""The generate stage: each setting changes the pictures, and the pictures record it."""

import io
import json
import shutil
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from artifacts.store import Artifact, Store
from configs.errors import Refused
from configs.load_recipe import load_recipe
from configs.settings.generate import read_settings
from runtimes.adapters.lora_files import LORA_WEIGHTS
from runtimes.process.job import Events, GenerateJob, Job
from runtimes.sample.generate_job import generate as draw_here
from tasks import generate
from tasks.build_or_reuse import RECIPE
from tasks.progress import Progress

pytestmark = pytest.mark.slow

COMMON: dict[str, Any] = {"num_inference_steps": 2, "num_images_per_prompt": 2, "guidance_scale": 3}


@pytest.fixture
def draw(tiny_sdxl: Path, tmp_path: Path) -> Callable[..., Artifact]:
    """`draw(**settings)` is the stage in this process, which saves the start of another."""

    def run(job: Job, on_event: Callable[[dict[str, Any]], None]) -> Any:
        assert isinstance(job, GenerateJob)
        return draw_here(job, Events())

    def drawn(**more: Any) -> Artifact:
        prompts = more.pop("prompts", ["a cat", "a dog"])
        given = {**COMMON, "device": "cpu", "store": str(tmp_path / "store"), **more}
        settings = read_settings(str(tiny_sdxl), prompts, given)
        model = generate.find_model(settings)
        settings = generate.with_sampler(settings, model)
        generate.check(settings, model)
        stage = generate.GenerateStage(settings, model, run)
        draft = Store(settings.store).draft(stage.parts)
        return draft.commit(stage.build(draft, Progress(stage.name)), {})

    return drawn


def pictures(artifact: Artifact) -> NDArray[np.uint8]:
    files = [artifact.read(name) for name in generate.sample_names(artifact)]
    return np.stack([np.asarray(Image.open(io.BytesIO(file))) for file in files])


def test_each_setting_changes_the_pictures(draw: Callable[..., Artifact]) -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"seed": 7},
        {"num_inference_steps": 3},
        {"guidance_scale": 2},
        {"negative_prompt": "blue"},
        {"dtype": "bfloat16"},
        {"scheduler": "euler_ancestral"},
        {"scheduler": "ddim", "ddim_eta": 0.5},
    ]
    artifacts = [draw(**more) for more in settings]
    assert len({artifact.key for artifact in artifacts}) == len(settings)
    for (one, drawn), (other, second) in combinations(zip(settings, artifacts, strict=True), 2):
        assert (pictures(drawn) != pictures(second)).any(), f"{one} and {other} draw the same"
    for more, artifact in zip(settings, artifacts, strict=True):
        said = json.loads(artifact.read(generate.LIST))["settings"]
        assert {**COMMON, "seed": 42, **more}.items() <= said.items()


def test_size_rounds_and_fixed_noise(draw: Callable[..., Artifact]) -> None:
    wide = pictures(draw(width=48, height=24))
    assert wide.shape == (4, 24, 48, 3)
    rounds, fixed = (pictures(draw(num_rounds=2, fixed_noise=fixed)) for fixed in (False, True))
    assert len(rounds) == len(fixed) == 8
    np.testing.assert_array_equal(rounds[:2], fixed[:2])
    np.testing.assert_array_equal(fixed[:4], fixed[4:])
    assert (rounds[:4] != rounds[4:]).any()


def test_prompts_that_are_cut_are_told_the_negative_one_too(
    draw: Callable[..., Artifact], caplog: pytest.LogCaptureFixture
) -> None:
    artifact = draw(prompts=["a cat", "x" * 90], negative_prompt="y" * 90)
    (line,) = (one.message for one in caplog.records if " cut at " in one.message)
    assert line.startswith("generate: 2 of 3 prompts are cut at 77 tokens, the limit of text_enc")
    assert artifact.summary["cut"]["text_encoder"] == {"tokens": 77, "cut": 2}
    shown = generate.GenerateStage.show(artifact)[1]
    assert shown.values["cut"] == {"cut at 77 by text_encoder": 2, "cut at 77 by text_encoder_2": 2}


def test_the_grid_has_the_requested_columns(draw: Callable[..., Artifact]) -> None:
    artifact = draw()
    size = 32 + generate.GAP
    for columns, rows in ((4, 1), (3, 2), (9, 1)):
        page = np.asarray(Image.open(io.BytesIO(generate.grid(artifact, columns))))
        wide = min(columns, 4)
        assert page.shape == (rows * size - generate.GAP, wide * size - generate.GAP, 3)
    np.testing.assert_array_equal(page[:, size : size + 32], pictures(artifact)[1])
    first = Image.open(io.BytesIO(generate.grid(artifact, 2, 2)))
    assert first.size == (2 * size - generate.GAP, 32)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_image": 2}, r"num_image: unknown setting \(did you mean num_images_per_prompt\?\)"),
        ({"model": "other"}, "model is an argument"),
        ({"file": "prompts.txt"}, "set either prompts or file"),
        ({"prompts": ("caf\udce9",)}, r"prompts\.0 is not UTF-8: 'caf\\udce9'"),
        ({"prompts": ()}, "it has no prompts: set prompts, or file"),
        ({"negative_prompt": "blue", "guidance_scale": 1}, "raise guidance_scale above 1"),
        ({"true_cfg_scale": 3}, "true_cfg_scale: it is for flux, not sdxl: set guidance_scale"),
        ({"aesthetic_score": 7}, "aesthetic_score has no effect with a model that was not trained"),
        ({"ddim_eta": 0.5, "scheduler": "euler"}, "ddim_eta is for scheduler ddim"),
        ({"num_inference_steps": 1001}, "^num_inference_steps: .* takes 1 to 1000 steps"),
        ({"height": 36}, "height: 36 is not a multiple"),
        ({"device": "tpu"}, "device: tpu is not on this machine"),
        ({"runtime": "jax", "scheduler": "ddpm"}, "^scheduler: runtime jax cannot draw with DDPM"),
    ],
)
def test_unsupported_settings_are_one_line_errors(
    draw: Callable[..., Artifact], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises((Refused), match=words) as caught:
        draw(**settings)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("model", ["tiny_flux2_distilled", "tiny_flux_schnell"])
def test_a_guidance_scale_without_effect_is_refused(
    request: pytest.FixtureRequest, model: str
) -> None:
    folder = str(request.getfixturevalue(model))

    def check(**given: Any) -> None:
        settings = read_settings(folder, ["a cat"], {"device": "cpu", **given})
        found = generate.find_model(settings)
        generate.check(generate.with_sampler(settings, found), found)

    for accepted in ({}, {"guidance_scale": 1}):
        check(**accepted)
    with pytest.raises(Refused, match=r"^guidance_scale: this model .*: set 1"):
        check(guidance_scale=3)
    with pytest.raises(Refused, match="negative_prompt: it has no effect without guidance"):
        check(negative_prompt="blue")


def sampler(model: Path, **given: Any) -> dict[str, Any]:
    """The settings with which `kiln generate` draws."""
    settings = read_settings(str(model), ["a cat"], given)
    return generate.with_sampler(settings, generate.find_model(settings)).model_dump()


@pytest.mark.parametrize(
    ("model", "steps", "scale"),
    [
        ("tiny_sd", 50, 7.5),
        ("tiny_sdxl", 50, 5.0),
        ("tiny_sd3", 28, 7.0),
        ("tiny_flux", 28, 3.5),
        ("tiny_flux_schnell", 28, 1.0),
        ("tiny_flux2", 50, 4.0),
        ("tiny_flux2_distilled", 50, 1.0),
        ("tiny_z_image", 50, 5.0),
        ("tiny_qwen_image", 50, 4.0),
    ],
)
def test_a_model_without_a_recipe_is_drawn_with_the_defaults_of_its_family(
    request: pytest.FixtureRequest, model: str, steps: int, scale: float
) -> None:
    folder = request.getfixturevalue(model)
    found = sampler(folder)
    assert (found["num_inference_steps"], found["guidance_scale"]) == (steps, scale)
    assert sampler(folder, num_inference_steps=None, guidance_scale=None) == found
    assert sampler(folder, guidance_scale=2)["guidance_scale"] == 2
    assert (found["scheduler"], found["dtype"], found["true_cfg_scale"]) == (None, "float32", 1)


def publish(pipeline: Path, folder: Path, evaluate: Any, *, alone: bool = False) -> Path:
    """A folder with a recipe: of the pipeline's files, or of adapters for it, without weights."""
    if alone:
        folder.mkdir()
        (folder / LORA_WEIGHTS).touch()
    else:
        shutil.copytree(pipeline, folder)
    recipe = {"model": {"path": str(pipeline)}, "evaluate": evaluate}
    (folder / RECIPE).write_text(json.dumps(recipe), encoding="utf-8")
    return folder


@pytest.mark.parametrize("alone", [False, True])
def test_a_published_model_is_drawn_as_it_was_evaluated(
    tiny_flux_schnell: Path, tmp_path: Path, alone: bool
) -> None:
    recipe = load_recipe(
        "flux-schnell",
        {
            **{"evaluate.scheduler": "euler", "evaluate.true_cfg_scale": 2, "evaluate.seed": 5},
            **{"evaluate.height": 48, "evaluate.width": 32, "evaluate.batch_size": 7},
        },
    )
    evaluated = json.loads(recipe.evaluate.model_dump_json())
    folder = publish(tiny_flux_schnell, tmp_path / "published", evaluated, alone=alone)
    found = sampler(folder)
    expected = {"num_inference_steps": 4, "guidance_scale": 1, "true_cfg_scale": 2}
    expected |= {"scheduler": "euler", "height": 48, "width": 32, "dtype": "bfloat16"}
    assert expected.items() <= found.items()
    assert (found["seed"], found["num_images_per_prompt"]) == (42, 4)  # no sampler's: defaults
    given = {"scheduler": None, "num_inference_steps": 9, "dtype": "float32", "true_cfg_scale": 1}
    assert sampler(folder, **given) == {**found, **given}


UNSET = {"num_inference_steps": None, "guidance_scale": None}


@pytest.mark.parametrize("evaluate", [None, ["cmmd"], {"metrics": "all"}, UNSET])
def test_a_recipe_of_another_program_is_ignored(
    tiny_sdxl: Path, tmp_path: Path, evaluate: Any
) -> None:
    found = sampler(publish(tiny_sdxl, tmp_path / "other", evaluate))
    assert (found["num_inference_steps"], found["guidance_scale"]) == (50, 5)


def test_a_recipe_with_a_value_that_no_evaluation_has_is_a_one_line_error(
    tiny_sdxl: Path, tmp_path: Path
) -> None:
    folder = publish(tiny_sdxl, tmp_path / "edited", {"num_inference_steps": "many"})
    with pytest.raises(
        Refused, match=r"^recipe.yaml of .*: num_inference_steps: .*'many'.*-o"
    ) as caught:
        sampler(folder)
    assert len(str(caught.value).splitlines()) == 1
    assert sampler(folder, num_inference_steps=3)["num_inference_steps"] == 3


def test_a_scheduler_that_lacks_the_noise_of_the_model_is_refused(
    draw: Callable[..., Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"_class_name": "DDIMScheduler", "rescale_betas_zero_snr": True}
    monkeypatch.setattr(generate, "read_scheduler_config", lambda folder: own)
    with pytest.raises(Refused, match="lms cannot draw a model with zero terminal SNR"):
        draw(scheduler="lms")


@pytest.fixture
def reference(tmp_path: Path) -> str:
    path = tmp_path / "reference.png"
    Image.new("RGB", (64, 48), (200, 30, 30)).save(path)
    return str(path)


def test_references_are_in_the_key_by_content_and_prepared_as_in_training(
    tiny_flux2: Path, tmp_path: Path, reference: str
) -> None:
    folder = publish(tiny_flux2, tmp_path / "published", {})
    recipe = json.loads((folder / RECIPE).read_text())
    recipe["encode"] = {"reference_pixels": 4096, "bucket_step": 32}
    (folder / RECIPE).write_text(json.dumps(recipe))

    def stage_of(model: Path, **given: Any) -> generate.GenerateStage:
        settings = read_settings(str(model), ["a cat"], {"device": "cpu", **given})
        found = generate.find_model(settings)
        settings = generate.with_sampler(settings, found)
        generate.check(settings, found)
        return generate.GenerateStage(settings, found)

    def key(model: Path, **given: Any) -> str:
        return stage_of(model, **given).parts.key

    stage = stage_of(folder, references=[reference])
    job = stage._job(("a cat", "a cat"), tmp_path, "")
    assert job.references == ((reference,), (reference,))
    assert (job.reference_pixels, job.reference_step) == (4096, 32)
    plain = stage_of(tiny_flux2, references=[reference]).options
    assert (plain.reference_pixels, plain.reference_step) == (1024 * 1024, 8)
    copied = str(shutil.copy(reference, tmp_path / "copy.png"))
    other = tmp_path / "other.png"
    Image.new("RGB", (64, 48)).save(other)
    assert key(tiny_flux2, references=[copied]) == key(tiny_flux2, references=[reference])
    drawn = [
        {},
        {"references": [reference]},
        {"references": [str(other)]},
        {"references": [reference, str(other)]},
        {"references": [reference], "reference_pixels": 1024},
    ]
    assert len({key(tiny_flux2, **given) for given in drawn}) == len(drawn)
    assert "reference_pixels" not in stage_of(tiny_flux2).settings


def test_a_reference_at_a_url_is_drawn_as_its_local_copy(
    tiny_flux2: Path, tmp_path: Path, reference: str, own_cache: Path
) -> None:
    url = "memory://references/red.png"
    fsspec.filesystem("memory").pipe_file(url, Path(reference).read_bytes())

    def stage_of(place: str) -> generate.GenerateStage:
        settings = read_settings(str(tiny_flux2), ["a cat"], {"references": [place]})
        generate.check_reference_files(settings)
        found = generate.find_model(settings)
        return generate.GenerateStage(generate.with_sampler(settings, found), found)

    remote, local = stage_of(url), stage_of(reference)
    assert remote.inputs == local.inputs
    ((copy,),) = remote._job(("a cat",), tmp_path, "").references
    assert Path(copy).is_relative_to(own_cache)
    assert Path(copy).read_bytes() == Path(reference).read_bytes()


@pytest.mark.parametrize(
    ("model", "count", "words"),
    [
        ("tiny_flux", 1, "family flux reads no references: .* flux2, flux_kontext"),
        ("tiny_flux_kontext", 2, "family flux_kontext reads at most 1, not 2: give one"),
        ("tiny_flux2", 11, "reads at most 10, not 11: give 10 of them"),
    ],
)
def test_references_that_a_family_does_not_read_are_refused(
    request: pytest.FixtureRequest, model: str, count: int, words: str, reference: str
) -> None:
    folder = str(request.getfixturevalue(model))
    settings = read_settings(
        folder, ["a cat"], {"device": "cpu", "references": [reference] * count}
    )
    with pytest.raises(Refused, match=words):
        generate.check_here(settings)


def test_a_reference_that_is_no_picture_is_refused_before_a_model_is_fetched(
    tmp_path: Path,
) -> None:
    text = tmp_path / "notes.png"
    text.write_text("no picture")
    settings = read_settings("owner/not-here", ["a cat"], {"references": [str(text)]})
    with pytest.raises(Refused, match=r"reference .*notes\.png cannot be read as a picture"):
        generate.check_here(settings)
