"""Pictures and held-out losses: the same each time, resumable, and wrong weights are named.

That pictures are those of diffusers' pipelines is shown by tests/conformance/test_drawing.py.
"""

import json
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from jobs import HOLDOUT, SAMPLER
from training import RecordedEvents

import runtimes.sample.generate_job
import runtimes.torch.sampler as torch_generate
from configs.errors import Refused
from runtimes.pipeline_folder.weights import weight_variant
from runtimes.process.job import Drawing, GenerateJob
from runtimes.torch_models.offload import offload_layers

pytestmark = pytest.mark.slow

PROMPTS = ("one", "two", "three")


@pytest.fixture(scope="module")
def tuned(tiny_sdxl: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A UNet that differs from the pipeline's own."""
    unet = UNet2DConditionModel.from_pretrained(tiny_sdxl, subfolder="unet")
    with torch.no_grad():
        unet.conv_out.bias += 0.5
    folder = tmp_path_factory.mktemp("tuned")
    unet.save_pretrained(folder)
    return folder


@pytest.fixture
def job(tiny_sdxl: Path, tuned: Path, latents_url: str, tmp_path: Path) -> GenerateJob:
    return GenerateJob(
        runtime="torch",
        model=str(tiny_sdxl),
        drawings=(
            Drawing(str(tmp_path / "base")),
            Drawing(str(tmp_path / "tuned"), {"unet": str(tuned)}),
        ),
        prompts=PROMPTS,
        sampler=SAMPLER,
        device="cpu",
        latents=latents_url,
        holdout=HOLDOUT,
    )


def generate(job: GenerateJob) -> tuple[list[dict[str, bytes]], list[int]]:
    heard = RecordedEvents()
    runtimes.sample.generate_job.generate(job, heard)
    folders = [Path(drawing.out) for drawing in job.drawings]
    files = [{p.name: p.read_bytes() for p in sorted(f.iterdir())} for f in folders]
    drawn = heard.of("drawn")
    assert {kind for kind, _ in heard.events} <= {"drawn", "losses"}
    assert {event["total"] for event in drawn} <= {6}
    return files, [event["done"] for event in drawn]


def elsewhere(job: GenerateJob, folder: Path) -> GenerateJob:
    moved = [replace(d, out=str(folder / Path(d.out).name)) for d in job.drawings]
    return replace(job, drawings=tuple(moved))


def test_offloaded_layers_draw_the_same_pictures(
    job: GenerateJob,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a GPU, nothing moves, and a warning says so: the hooks change no picture."""
    plain, _ = generate(job)
    offloaded: list[str] = []

    def recorded(model: Any, device: torch.device) -> None:
        offloaded.append(type(model).__name__)
        offload_layers(model, device)

    monkeypatch.setattr(torch_generate, "offload_layers", recorded)
    again, _ = generate(elsewhere(replace(job, offload=True), tmp_path / "offloaded"))
    assert again == plain
    assert "offload has no effect on cpu" in caplog.text
    # The text encoders once, before any denoiser: their prompt embeddings serve all models.
    text_encoders = ["CLIPTextModel", "CLIPTextModelWithProjection"]
    assert offloaded == [*text_encoders, "UNet2DConditionModel", "UNet2DConditionModel"]


def test_no_text_encoder_exists_beside_a_denoiser(
    job: GenerateJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host with 32 GB holds FLUX.1's transformer or its T5, not both."""
    load, encoders, alive = torch_generate.load_text_encoder, list[Any](), list[int]()
    load_denoiser = torch_generate.load_network

    def read(*given: Any) -> Any:
        model = load(*given)
        encoders.append(weakref.ref(model))
        return model

    def counted(*given: Any) -> Any:
        alive.append(sum(encoder() is not None for encoder in encoders))
        return load_denoiser(*given)

    monkeypatch.setattr(torch_generate, "load_text_encoder", read)
    monkeypatch.setattr(torch_generate, "load_network", counted)
    generate(job)
    assert alive == [0, 0]
    assert len(encoders) == 2


def test_the_device_holds_one_denoiser_at_a_time(
    job: GenerateJob, tiny_sdxl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of a large model do not fit, nor one beside text encoders; plans of memory count one."""
    load, load_texts = torch_generate.load_network, torch_generate.load_text_encoders
    denoisers, alive = list[Any](), list[int]()

    def count() -> None:
        alive.append(sum(denoiser() is not None for denoiser in denoisers))

    def counted(*given: Any) -> Any:
        count()
        network = load(*given)
        denoisers.append(weakref.ref(network.denoiser))
        return network

    def counted_texts(*given: Any) -> Any:
        count()
        return load_texts(*given)

    monkeypatch.setattr(torch_generate, "load_network", counted)
    monkeypatch.setattr(torch_generate, "load_text_encoders", counted_texts)
    base, tuned = job.drawings
    own = {name: str(tiny_sdxl / name) for name in ("text_encoder", "text_encoder_2")}
    generate(replace(job, drawings=(base, replace(tuned, parts={**tuned.parts, **own}))))
    assert alive == [0, 0, 0, 0]


def test_the_same_pictures_each_time(job: GenerateJob, tmp_path: Path) -> None:
    first, drawn = generate(job)
    again, _ = generate(elsewhere(job, tmp_path / "again"))
    assert first == again
    base, tuned = first
    assert list(base) == ["00000.png", "00001.png", "00002.png", "losses.json"]
    assert len({*base.values(), *tuned.values()}) == 8, "all differ"
    assert drawn == sorted(drawn) and drawn[-1] == 6


def test_what_is_there_is_kept_and_what_is_not_is_drawn_alike(job: GenerateJob) -> None:
    first, _ = generate(job)
    base, tuned = (Path(drawing.out) for drawing in job.drawings)
    for path in (base / "00001.png", tuned / "00002.png", tuned / "losses.json"):
        path.unlink()
    kept = (base / "00000.png").stat().st_mtime_ns
    again, drawn = generate(job)
    assert again == first
    assert (base / "00000.png").stat().st_mtime_ns == kept
    assert drawn == [3, 5, 6], "batches are drawn whole"


def test_a_vae_in_place_of_the_pipeline_s_own(job: GenerateJob, tiny_vae: Path) -> None:
    own, _ = generate(replace(job, drawings=job.drawings[:1], latents=None, prompts=PROMPTS * 2))
    shutil.rmtree(job.drawings[0].out)
    other, _ = generate(
        replace(
            job, drawings=job.drawings[:1], latents=None, prompts=PROMPTS * 2, vae=str(tiny_vae)
        )
    )
    assert own != other and "losses.json" not in own[0]


def test_parts_may_be_stored_in_different_variants(job: GenerateJob, tmp_path: Path) -> None:
    job = replace(job, drawings=job.drawings[:1], latents=None)
    plain, _ = generate(replace(job, prompts=PROMPTS * 2))
    model = Path(shutil.copytree(job.model, tmp_path / "model"))
    for name in ("text_encoder/model", "vae/diffusion_pytorch_model"):
        (model / f"{name}.safetensors").rename(model / f"{name}.fp16.safetensors")
    again = elsewhere(replace(job, prompts=PROMPTS * 2, model=str(model)), tmp_path / "again")
    assert generate(again)[0] == plain


@pytest.mark.parametrize(
    ("names", "variant"),
    [
        ("", None),
        ("model", None),
        ("model.fp16", "fp16"),
        ("model model.fp16", None),
        ("model.bf16 model.fp16", "bf16"),
        ("model-00001-of-00002 model-00002-of-00002", None),
        ("model.fp16-00001-of-00002 model.fp16-00002-of-00002", "fp16"),
        ("model-00001-of-00002.fp16 model-00002-of-00002.fp16", "fp16"),
    ],
)
def test_the_variant_is_what_the_names_say(tmp_path: Path, names: str, variant: str | None) -> None:
    for name in names.split():
        (tmp_path / f"{name}.safetensors").touch()
    assert weight_variant(tmp_path) == variant


def test_losses_are_a_number_a_sample_and_fall_with_a_better_model(job: GenerateJob) -> None:
    (base, tuned), _ = generate(job)
    losses, worse = (json.loads(files["losses.json"])["losses"] for files in (base, tuned))
    assert len(losses) == len(worse) == 4
    assert np.mean(worse) > np.mean(losses) + 0.1, "its predictions are off by a half"


def test_losses_of_an_evaluation_are_masked_as_those_of_training(
    job: GenerateJob, write_latents: Callable[..., str], tmp_path: Path
) -> None:
    """The masks of the held-out samples show nothing."""
    hidden = [np.zeros((8, 8), np.uint8)] * 4
    groups = [{"train/8x8": 1, "holdout/8x8": 4}]
    url = write_latents(tmp_path / "masked", groups, loss_masks=hidden)

    def losses(name: str, **masked: Any) -> list[float]:
        own = replace(job, latents=url, holdout={**HOLDOUT, **masked})
        (files, _), _ = generate(elsewhere(own, tmp_path / name))
        return list(json.loads(files["losses.json"])["losses"])

    half = {"unmasked_weight": 0.5, "area_normalised": False}
    np.testing.assert_allclose(
        losses("half", masked_loss=half), np.array(losses("whole")) / 2, rtol=1e-5
    )


@pytest.mark.parametrize("missing", ["unet/config.json", "vae", "text_encoder", "model_index.json"])
def test_a_missing_part_is_named(job: GenerateJob, tmp_path: Path, missing: str) -> None:
    copied = Path(shutil.copytree(job.model, tmp_path / "copied"))
    path = copied / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(Refused, match=str(copied)):
        generate(replace(job, model=str(copied), latents=None))


def test_pictures_that_are_not_finite_are_an_error_and_no_file(
    job: GenerateJob, tmp_path: Path
) -> None:
    """As bytes they would be black, and comparable."""
    unet = UNet2DConditionModel.from_pretrained(job.model, subfolder="unet")
    torch.nn.init.constant_(unet.conv_out.bias, torch.nan)
    unet.save_pretrained(tmp_path / "nan")
    drawing = Drawing(str(tmp_path / "out"), {"unet": str(tmp_path / "nan")})
    with pytest.raises(Refused, match="pictures are not finite"):
        generate(replace(job, drawings=(drawing,), latents=None, prompts=PROMPTS * 2))
    assert not list((tmp_path / "out").iterdir())
