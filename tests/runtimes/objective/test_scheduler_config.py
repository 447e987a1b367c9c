"""What training makes of the base's scheduler, and that diffusers can draw with it."""

import json
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from tolerances import assert_close

from configs.errors import Refused
from configs.settings.train import Train
from runtimes.objective.noise_schedule import (
    PREDICTS_SAMPLE,
    RESCALES_BETAS,
    SCHEDULERS,
    FlowSchedule,
    NoiseSchedule,
    drawing_config,
    read_schedule,
    scheduler_config,
    trained_scheduler_config,
)
from runtimes.torch_models.loading import make_scheduler

SCALED = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}


def config_of(name: str, **more: object) -> dict:
    return {"_class_name": name, **SCALED, "timestep_spacing": "leading", **more}


def write(folder: Path, config: dict) -> Path:
    (folder / "scheduler_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize("base", [config_of("PNDMScheduler"), FLOW])
def test_settings_that_are_null_leave_the_scheduler_alone(base: dict) -> None:
    assert scheduler_config(base, Train()) == base
    assert trained_scheduler_config(base, Train()) is None


def test_what_the_base_says_already_changes_nothing() -> None:
    same = Train(prediction_type="epsilon", zero_terminal_snr=False)
    base = config_of("EulerDiscreteScheduler")  # both are what diffusers assumes
    assert trained_scheduler_config(base, same) is None
    assert trained_scheduler_config(FLOW, Train(prediction_type="flow")) is None


def test_the_scheduler_config_records_retraining(tmp_path: Path) -> None:
    base = config_of("EulerDiscreteScheduler", prediction_type="epsilon")
    settings = Train(prediction_type="v_prediction", zero_terminal_snr=True)
    changed = trained_scheduler_config(base, settings)
    assert changed == {
        **base,
        "prediction_type": "v_prediction",
        "rescale_betas_zero_snr": True,
        "timestep_spacing": "trailing",
    }
    schedule = read_schedule(write(tmp_path, base), settings)
    assert isinstance(schedule, NoiseSchedule) and schedule.prediction_type == "v_prediction"
    assert schedule.alphas_cumprod[-1] == 0 and read_schedule(tmp_path).prediction_type == "epsilon"


def test_a_rescaled_base_can_be_trained_back(tmp_path: Path) -> None:
    base = config_of("DDIMScheduler", prediction_type="v_prediction", rescale_betas_zero_snr=True)
    schedule = read_schedule(write(tmp_path, base), Train(zero_terminal_snr=False))
    assert isinstance(schedule, NoiseSchedule) and schedule.alphas_cumprod[-1] > 0.004


def test_a_scheduler_that_cannot_say_it_gives_way_to_one_that_can() -> None:
    base = config_of("PNDMScheduler", steps_offset=1, set_alpha_to_one=False, skip_prk_steps=True)
    over = Train(prediction_type="v_prediction")
    assert scheduler_config(base, over)["_class_name"] == "PNDMScheduler"  # it knows velocities
    for settings in (Train(zero_terminal_snr=True), Train(prediction_type="sample")):
        changed = scheduler_config(base, settings)
        assert changed["_class_name"] == "DDIMScheduler" and "skip_prk_steps" not in changed
        scheduler = make_scheduler(changed)
        assert scheduler.config.steps_offset == 1 and not scheduler.config.clip_sample
        ours = NoiseSchedule.from_config(changed)
        assert_close(ours.alphas_cumprod, scheduler.alphas_cumprod)
    rescaled = config_of("EulerAncestralDiscreteScheduler", rescale_betas_zero_snr=True)
    changed = scheduler_config(rescaled, Train(prediction_type="sample"))
    assert NoiseSchedule.from_config(changed).alphas_cumprod[-1] == 0


@pytest.mark.parametrize("name", sorted(RESCALES_BETAS))
def test_schedulers_do_what_we_count_on(name: str) -> None:
    """Zero terminal SNR is in their noise; a perfect prediction leads them to the picture."""
    kinds = ["v_prediction", *(["sample"] if name in PREDICTS_SAMPLE else [])]
    for kind in kinds:
        settings = Train(prediction_type=kind, zero_terminal_snr=True)  # type: ignore[arg-type]
        config = scheduler_config(config_of(name, clip_sample=False), settings)
        scheduler = make_scheduler(config)
        assert scheduler.alphas_cumprod[-1] < 1e-7
        schedule = NoiseSchedule.from_config(config)
        picture = torch.linspace(-1, 1, 16).reshape(1, 1, 4, 4)
        scheduler.set_timesteps(10)
        assert scheduler.timesteps[0] == 999
        noise = torch.randn(1, 1, 4, 4, generator=torch.Generator().manual_seed(0))
        latents = noise * scheduler.init_noise_sigma
        for t in scheduler.timesteps:
            seen = scheduler.scale_model_input(latents, t)
            level = np.array([int(t)], np.int32)
            alpha, sigma = schedule.coefficients(level)
            noise = (seen - alpha.item() * picture) / sigma.item()
            said = schedule.target(picture.numpy(), noise.numpy(), level)
            latents = scheduler.step(torch.from_numpy(said), t, latents).prev_sample
        torch.testing.assert_close(latents, picture, atol=0.05, rtol=0)


@pytest.mark.parametrize("name", sorted(SCHEDULERS.keys() - {"flow_euler"}))
@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"zero_terminal_snr": True, "prediction_type": "v_prediction"}, {"lms", "pndm"}),
        ({"prediction_type": "sample"}, {"euler_ancestral", "pndm"}),
        ({"prediction_type": "v_prediction"}, set()),
    ],
)
def test_a_chosen_scheduler_draws_with_the_noise_of_the_training_or_is_refused(
    name: str, settings: dict, refused: set[str]
) -> None:
    config = scheduler_config(config_of("EulerDiscreteScheduler"), Train(**settings))
    if name in refused:
        with pytest.raises(Refused, match=f"scheduler {name} cannot draw a model with .* ddim,"):
            drawing_config(config, name)
        return
    scheduler, picture = make_scheduler(drawing_config(config, name)), torch.zeros(1, 1, 4, 4)
    assert_close(NoiseSchedule.from_config(config).alphas_cumprod, scheduler.alphas_cumprod)
    scheduler.set_timesteps(10)
    t = scheduler.timesteps[0]
    scheduler.step(scheduler.scale_model_input(picture, t), t, picture)


@pytest.mark.parametrize(
    ("base", "settings", "message"),
    [
        (FLOW, {"prediction_type": "epsilon"}, "prediction_type: epsilon, but the base is a flow"),
        (FLOW, {"zero_terminal_snr": True}, "zero_terminal_snr is for diffusion"),
        (config_of("DDIMScheduler"), {"prediction_type": "flow"}, "flow needs a base with a Flow"),
    ],
)
def test_no_training_between_flow_and_diffusion(base: dict, settings: dict, message: str) -> None:
    with pytest.raises(Refused, match=message):
        scheduler_config(base, Train(**settings))


def test_the_flow_of_a_folder(tmp_path: Path) -> None:
    diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(tmp_path)
    schedule = read_schedule(tmp_path, Train())
    assert isinstance(schedule, FlowSchedule)
    assert schedule.sigmas[499] == pytest.approx(3 * 0.5 / (1 + 2 * 0.5))


def test_a_scheduler_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"scheduler_config\.json is missing"):
        read_schedule(tmp_path)
    (tmp_path / "scheduler_config.json").write_text("{")
    with pytest.raises(Refused, match=r"scheduler_config\.json: "):
        read_schedule(tmp_path)
    with pytest.raises(Refused, match=r"scheduler_config\.json: .*beta_schedule 'cosine'"):
        read_schedule(write(tmp_path, {"beta_schedule": "cosine"}))
    for hostile in ("DDIMScheduler\nraise SystemExit", ["DDIMScheduler"]):
        with pytest.raises(Refused, match="no name of a class: the model may be hostile"):
            read_schedule(write(tmp_path, {"_class_name": hostile}))
    with pytest.raises(Refused, match="the scheduler NoSuch is not of this version"):
        make_scheduler({"_class_name": "NoSuch"})
