"""Checks that every family of flow models passes, against its pipeline in diffusers."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import chips
import diffusers_script
import numpy as np
import pytest
import torch
from diffusers_script import Script, assert_figures, read_pictures
from jobs import HOLDOUT, MakeJob, predicted, trained
from safetensors.torch import save_file
from training import history, roll_back, train, weights

from runtimes.adapters.lora_files import LORA_WEIGHTS, read_adapters, to_kohya
from runtimes.families import FAMILIES
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import Drawing, EncodeJob, Events, GenerateJob, TrainJob
from runtimes.sample.generate_job import generate
from runtimes.torch_models.network import Network
from runtimes.torch_models.vae_text_encoders import Encoder
from runtimes.train.training_loop import write_result
from tasks.publish.assemble import assemble

STEPS, GUIDANCE = 20, 3.5
SIZE = {"height": 32, "width": 48}
SAMPLER = {"seed": 7, "num_inference_steps": 3, "guidance_scale": GUIDANCE, "batch_size": 2} | SIZE
WriteLatents = Callable[..., str]


@dataclass(frozen=True)
class Trained:
    """How a family is trained by diffusers' script."""

    script_of: Callable[[TrainJob], Script]
    targets: list[str]  # the layers that adapters are for
    adapted: int  # how many of the tiny transformer they are
    in_soak: tuple[str, ...]  # the names of `cases` that another family proves
    info: dict[str, Any] = field(default_factory=dict)  # of the latents


@dataclass(frozen=True)
class FlowFamily:
    """A family, and how its tests call diffusers."""

    name: str
    pipeline: Any  # diffusers' class
    prompts: tuple[str, ...]
    #: (pipeline, prompts, **changes) -> levels [N, H, W, 3] of the pictures that SAMPLER gives.
    of_diffusers: Callable[..., Any]
    trained: Trained | None = None  # None: its test file says so
    plain: dict[str, Any] = field(default_factory=dict)  # arguments for no guidance
    grey: Callable[[Path], dict[str, Any]] = lambda model: {}  # for the negative prompt `grey`

    def pictures(self, runtime: str, out: Path, model: Path, **changes: Any) -> Any:
        """Levels [N, H, W, 3] of Kilnworks' pictures."""
        drawing, sampler = Drawing(str(out)), SAMPLER | changes
        return diffusers_script.pictures(runtime, drawing, model, self.prompts, sampler)

    def reference(self, model: Path, **changes: Any) -> Any:
        """The same of diffusers."""
        return self.of_diffusers(self.pipeline.from_pretrained(model), self.prompts, **changes)


def job_maker(make_job: MakeJob, write_latents: WriteLatents, folder: Path, **info: Any) -> MakeJob:
    """`make(model, **settings)`: a job on pictures of two shapes; `info` changes the latents'."""
    groups = {"train/8x8": 23, "train/4x12": 9, "holdout/8x8": 3}

    def make(model: Path, name: str = "run", **settings: Any) -> TrainJob:
        described = Base.open(model).encoders | info
        latents = write_latents(str(folder / "store"), [groups], **described)
        given = {"steps": STEPS, "max_grad_norm": 1.0, **settings}
        return make_job(name=name, model=str(model), latents=latents, **given)

    return make


def cases(targets: Sequence[str], **given: Any) -> dict[str, dict[str, Any]]:
    """Settings with which a job must have the figures of a script, by name."""
    lora = {"rank": 4, "alpha": 8.0, "target_modules": list(targets)}
    return {
        "full": given,
        "weighted": {**given, "weighting_scheme": "cosmap"},
        "accumulated": {**given, "micro_batch_size": 1},
        "lora": {**given, "learning_rate": 1e-2, "method": "lora", "lora": lora},
    }


def tiered(cases: Collection[str], in_soak: Collection[str]) -> list[Any]:
    """Parameters of a test: names of cases.

    Only `full` is in `make test`, and `make soak` alone runs those of `in_soak`.
    """
    return [
        pytest.param(
            one,
            marks=[pytest.mark.soak] * (one in in_soak) + [pytest.mark.extended] * (one != "full"),
        )
        for one in cases
    ]


def assert_figures_of_case(job: TrainJob, script: Script, case: str, targets: list[str]) -> None:
    """Twenty steps of a job of `cases` have the figures of diffusers' script."""
    if case == "lora":
        script.add_adapters(4, 8.0, targets)
    assert_figures(job, script)


def assert_latents_of_vae(encoder: Encoder, vae: Any, *, frames: bool = False) -> None:
    """The encoder's moments must be the posterior's to the bit; `frames`: the VAE takes videos."""
    pixels = np.random.default_rng(0).uniform(-1, 1, (2, 3, 32, 48)).astype(np.float32)
    moments, given = encoder.images(pixels), torch.from_numpy(pixels)
    with torch.no_grad():
        posterior = vae.encode(given.unsqueeze(2) if frames else given).latent_dist
    for ours, theirs in zip(moments, (posterior.mean, posterior.logvar), strict=True):
        assert torch.equal(torch.from_numpy(ours), theirs.squeeze(2) if frames else theirs)


def assert_jax_encodes_as_torch(model: Path, prompts: tuple[str, ...]) -> None:
    chips.require("jax")
    from runtimes.jax import sampler as of_jax

    job = EncodeJob("jax", str(model), None, 4, "cpu", "float32")
    found, _ = of_jax.open_encoder(job).texts(prompts)
    expected, _ = Encoder(Base.open(model)).texts(prompts)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def assert_pictures(
    family: FlowFamily, model: Path, out: Path, most: tuple[int, int] = (0, 1), **changes: Any
) -> None:
    """Pictures of torch and jax must be diffusers', within `most` levels.

    Args:
        changes: `ours` and `theirs`: settings of the sampler and arguments of the pipeline.
    """
    chips.require("jax")
    expected = family.reference(model, **changes.get("theirs", {}))
    for runtime, levels in zip(("torch", "jax"), most, strict=True):
        drawn = family.pictures(runtime, out / runtime, model, **changes.get("ours", {}))
        assert np.abs(drawn - expected).max() <= levels, runtime


def assert_a_run_moves_to_jax_and_back(make: MakeJob, model: Path, **given: Any) -> None:
    """A run that moves has the figures of one that stays; a resumed one has its weights."""
    chips.require("jax")
    settings = {"steps": 6, "checkpointing_steps": 2, "checkpoints_total_limit": 9}
    settings |= {"caption_dropout_rate": 0.3, **given}
    whole = make(model, "whole", **settings)
    assert train(whole) == 0
    moved = make(model, "moved", **settings)
    for runtime, first, left in (("torch", 0, 2), ("jax", 2, 4), ("torch", 4, None)):
        assert train(replace(moved, runtime=runtime)) == first
        if left is not None:
            roll_back(moved, left)
    for name, wanted in (("loss", 1e-4), ("grad_norm", 1e-3)):
        found, expected = ([line[name] for line in history(job)] for job in (moved, whole))
        assert found == pytest.approx(expected, rel=wanted)
    before = weights(whole)
    assert before.keys() == weights(moved).keys()
    roll_back(whole, 4)
    assert train(whole) == 4
    assert weights(whole) == before


def assert_drawn_measured_and_published(
    family: FlowFamily, job: TrainJob, out: Path, **holdout: Any
) -> tuple[Any, Callable[..., Any]]:
    """Train; the trained model has the lower loss, and draws what the published folder does.

    Args:
        holdout: changes to the settings of the held-out loss.

    Returns:
        The losses [model, sample, noise level], and a function from such changes to losses.
    """
    train(job)
    parts = {"transformer": f"{job.out}/transformer"}
    drawings = (Drawing(str(out / "base")), Drawing(str(out / "tuned"), parts))

    def losses(**more: Any) -> Any:
        paths = [Path(drawing.out, "losses.json") for drawing in drawings]
        for path in paths:
            path.unlink(missing_ok=True)
        given = ("torch", job.model, drawings, family.prompts, SAMPLER, "cpu")
        levels = {**HOLDOUT, "levels": 4, **more}
        drawn = GenerateJob(*given, latents=job.latents, holdout=levels)
        generate(drawn, Events())
        return np.array([json.loads(path.read_text())["losses"] for path in paths])

    found = losses(**holdout)
    assert found.shape == (2, 3, 4), "model, sample, noise level"
    assert found[1].mean() < found[0].mean()
    replaced = {"transformer": Path(parts["transformer"])}
    assemble(Base.of(job), replaced, out / "p", dtype="float32")
    assert np.array_equal(read_pictures(Path(drawings[1].out)), family.reference(out / "p"))
    return found, losses


def as_kohya(family: str, job: TrainJob) -> dict[str, torch.Tensor]:
    """The tensors of a job's adapters in kohya's layout."""
    config = json.loads((Path(job.model) / "transformer/config.json").read_text())
    names = FAMILIES[family].kohya
    assert names is not None
    arrays = to_kohya(read_adapters(Path(job.out) / LORA_WEIGHTS), names, config)
    return {name: torch.as_tensor(a) for name, a in arrays.items()}


def assert_adapters_load(
    family: FlowFamily, job: TrainJob, out: Path, *, kohya: bool, count: int | None = None
) -> None:
    """A pipeline that loads trained adapters must predict what the runtime does.

    Args:
        kohya: whether kohya's layout must load too; diffusers ignores DoRA in it.
        count: of the transformer's adapted layers.
    """
    runtime, batch = trained(job)
    write_result(job, Base.of(job), runtime.state(), [])
    expected = predicted(runtime._network, batch)
    files = {LORA_WEIGHTS: Path(job.out)}
    ours = read_adapters(Path(job.out) / LORA_WEIGHTS)
    assert count is None or len(ours["transformer"]) == count
    if kohya:
        save_file(as_kohya(family.name, job), out / "kohya.safetensors")
        files["kohya.safetensors"] = out
    for name, folder in files.items():
        pipe = family.pipeline.from_pretrained(job.model)
        parts = {"transformer": pipe.transformer}
        if "input_ids" in batch.conditioning:  # the text encoder is trained, too
            parts["text_encoder"] = pipe.text_encoder
        network = Network(FAMILIES[family.name], parts)
        assert (expected - predicted(network, batch)).abs().max() > 1e-2
        pipe.load_lora_weights(folder, weight_name=name)
        torch.testing.assert_close(predicted(network, batch), expected, rtol=1e-4, atol=1e-5)
