"""The generate stage: each setting changes the pictures, and the pictures record it."""

import io
import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from artifacts.artifact_key import KeyParts
from artifacts.store import Artifact, Store
from configs.load_and_extend_recipe import RecipeError
from configs.settings.generate import read_settings
from runtimes.contract import WrongInput
from runtimes.process.events import Events
from runtimes.process.job import GenerateJob, Job
from runtimes.sample.generate_job import generate as draw_here
from tasks import generate
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
        generate.check(settings, model)
        key = generate.settings_for_key(settings)
        parts = KeyParts(generate.STAGE, generate.VERSION, key, {"model": model.digest})
        draft = Store(settings.store).draft(parts)
        progress = Progress(generate.STAGE)
        return draft.commit(generate.build(settings, model, draft, progress, run=run), {})

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
    with pytest.raises((RecipeError, WrongInput), match=words) as caught:
        draw(**settings)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("model", ["tiny_flux2_distilled", "tiny_flux_schnell"])
def test_a_guidance_scale_without_effect_is_refused(
    request: pytest.FixtureRequest, model: str
) -> None:
    folder = str(request.getfixturevalue(model))

    def check(**given: Any) -> None:
        settings = read_settings(folder, ["a cat"], {"device": "cpu", **given})
        generate.check(settings, generate.find_model(settings))

    for accepted in ({}, {"guidance_scale": 1}):  # by default it is 7.5, which nobody chose
        check(**accepted)
    with pytest.raises(WrongInput, match=r"^guidance_scale: this model .*: set 1"):
        check(guidance_scale=3)
    with pytest.raises(WrongInput, match="negative_prompt: it has no effect without guidance"):
        check(negative_prompt="blue")


def test_a_scheduler_that_lacks_the_noise_of_the_model_is_refused(
    draw: Callable[..., Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"_class_name": "DDIMScheduler", "rescale_betas_zero_snr": True}
    monkeypatch.setattr(generate, "read_scheduler_config", lambda folder: own)
    with pytest.raises(WrongInput, match="lms cannot draw a model with zero terminal SNR"):
        draw(scheduler="lms")
