"""The scheduler config of a trained model: the base's, or one with the changes of the settings.

Another prediction type or zero terminal SNR changes the model's noise schedule. Training, sampling
and the published scheduler_config.json must all use the changed config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from artifacts.records import parse_json
from configs.settings.train import Train
from runtimes.contract import WrongInput
from runtimes.objective.noise_schedule import FLOW, Schedule, is_flow, schedule_of

SCHEDULER_FILE = "scheduler_config.json"
#: diffusers schedulers with rescale_betas_zero_snr, and those with prediction_type `sample`.
RESCALES_BETAS = frozenset(
    {
        "DDIMScheduler",
        "DDPMScheduler",
        "DPMSolverMultistepScheduler",
        "EulerAncestralDiscreteScheduler",
        "EulerDiscreteScheduler",
        "UniPCMultistepScheduler",
    }
)
PREDICTS_SAMPLE = RESCALES_BETAS - {"EulerAncestralDiscreteScheduler"}
#: Schedulers for sampling: name in recipes -> diffusers class.
SCHEDULERS = {
    "ddim": "DDIMScheduler",
    "ddim_parallel": "DDIMParallelScheduler",
    "ddpm": "DDPMScheduler",
    "dpm++": "DPMSolverMultistepScheduler",
    "euler": "EulerDiscreteScheduler",
    "euler_ancestral": "EulerAncestralDiscreteScheduler",
    "flow_euler": "FlowMatchEulerDiscreteScheduler",
    "lms": "LMSDiscreteScheduler",
    "pndm": "PNDMScheduler",
}
#: Of SCHEDULERS, those without rescale_betas_zero_snr, and those without prediction_type `sample`.
NO_ZERO_SNR = ("lms", "pndm")
NO_SAMPLE = ("euler_ancestral", "pndm")
#: Schedulers that compiling runtimes support (sample/tabulated_schedulers.py).
TABULATED = (
    "DDIMScheduler",
    "DPMSolverMultistepScheduler",
    "EulerDiscreteScheduler",
    "FlowMatchEulerDiscreteScheduler",
)
#: Replaces a scheduler class that lacks a needed option: it has both, and is deterministic.
FALLBACK = "DDIMScheduler"
_KEPT = (
    "_diffusers_version",
    "num_train_timesteps",
    "beta_start",
    "beta_end",
    "beta_schedule",
    "trained_betas",
    "steps_offset",
    "set_alpha_to_one",
    "prediction_type",
    "rescale_betas_zero_snr",
    "timestep_spacing",
)


def read_scheduler_config(folder: Path) -> dict[str, Any]:
    """Read scheduler_config.json from a scheduler's folder. Raises WrongInput."""
    path = folder / SCHEDULER_FILE
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WrongInput(f"{path} is missing: the noise schedule is read from it") from None
    except (OSError, ValueError) as error:
        raise WrongInput(f"{path}: {error}") from None
    if not isinstance(config, dict):
        raise WrongInput(f"{path}: not a scheduler's config")
    kind = config.get("_class_name", "none")
    if not (isinstance(kind, str) and kind.isidentifier()):  # the card's code imports it
        raise WrongInput(f"{path}: {kind!r} is no name of a class: the model may be hostile")
    return config


def scheduler_config(base: Mapping[str, Any], settings: Train) -> dict[str, Any]:
    """The scheduler config of the trained model; equal to the base's without changes.

    DDIMScheduler, with the same noise schedule, replaces a class that lacks a changed option. Zero
    terminal SNR needs trailing timesteps (arXiv 2305.08891, section 3.3).

    Raises:
        WrongInput: the settings turn a diffusion model into a flow model, or the reverse.
    """
    if is_flow(base):
        _check_flow(base, settings)
        return dict(base)
    kind, zero_snr = settings.prediction_type, settings.zero_terminal_snr
    if kind == FLOW:
        raise WrongInput(
            f"train.prediction_type: flow needs a base with a FlowMatch scheduler, "
            f"this one's is {base.get('_class_name')}"
        )
    changed = {
        **({} if kind is None else {"prediction_type": kind}),
        **({} if zero_snr is None else {"rescale_betas_zero_snr": zero_snr}),
        **({"timestep_spacing": "trailing"} if zero_snr else {}),
    }
    lacks = (zero_snr and base.get("_class_name") not in RESCALES_BETAS) or (
        kind == "sample" and base.get("_class_name") not in PREDICTS_SAMPLE
    )
    return {**(_fallback(base) if lacks else base), **changed}


def read_schedule(folder: Path, settings: Train | None = None) -> Schedule:
    """The noise schedule of a scheduler's folder, with the changes of the settings, if given.

    Raises:
        WrongInput: the config is missing or unknown, or the settings contradict it.
    """
    config = read_scheduler_config(folder)
    if settings is not None:
        config = scheduler_config(config, settings)
    try:
        return schedule_of(config)
    except (ValueError, TypeError, OverflowError) as error:
        raise WrongInput(f"{folder / SCHEDULER_FILE}: {error}") from None


def trained_scheduler_config(folder: Path, settings: Train) -> dict[str, Any] | None:
    """The trained model's scheduler config; None if it equals the base's config in `folder`."""
    base = read_scheduler_config(folder)
    config = scheduler_config(base, settings)
    defaults = {"prediction_type": "epsilon", "rescale_betas_zero_snr": False}
    return None if {**defaults, **config} == {**defaults, **base} else config


def _check_flow(base: Mapping[str, Any], settings: Train) -> None:
    name = base["_class_name"]
    if settings.prediction_type not in (None, FLOW):
        raise WrongInput(
            f"train.prediction_type: {settings.prediction_type}, but the base is a flow "
            f"({name}): leave it null"
        )
    if settings.zero_terminal_snr is not None:
        raise WrongInput(
            f"train.zero_terminal_snr is for diffusion, and the base is a flow ({name}), which "
            "always ends in pure noise: set it to null"
        )


def _fallback(base: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: base[name] for name in _KEPT if name in base}
    return {"_class_name": FALLBACK, **kept, "clip_sample": False}


def drawing_config(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """`config` with the class of another scheduler, and the same noise schedule.

    Args:
        config: config of the model's own scheduler.
        name: a key of SCHEDULERS.

    Raises:
        WrongInput: one scheduler is for flow matching, the other for diffusion, or the other one
            lacks the model's noise schedule or prediction type.
    """
    kind = SCHEDULERS[name]
    if is_flow({"_class_name": kind}) != is_flow(config):
        raise WrongInput(
            f"scheduler {name} is not for this model, whose own is {config.get('_class_name')}"
        )
    if config.get("rescale_betas_zero_snr"):
        _refuse(name, NO_ZERO_SNR, "zero terminal SNR")
    if config.get("prediction_type") == "sample":
        _refuse(name, NO_SAMPLE, "prediction_type sample")
    return {**config, "_class_name": kind, "clip_sample": False}


def _refuse(name: str, lacking: Sequence[str], what: str) -> None:
    if name in lacking:
        others = [one for one in SCHEDULERS if one not in lacking and one != "flow_euler"]
        raise WrongInput(
            f"scheduler {name} cannot draw a model with {what}: choose one of {', '.join(others)}"
        )


def sampling_scheduler(
    scheduler: Any, sampler: Mapping[str, Any], make: Callable[[dict[str, Any]], Any]
) -> Any:
    """The scheduler for sampling: the sampler's choice, or the model's own.

    Args:
        scheduler: the model's own, of diffusers or mindone.
        sampler: as GenerateJob.sampler.
        make: constructs a scheduler from a config.

    Raises:
        WrongInput: the chosen scheduler does not fit the model.
    """
    if (name := sampler.get("scheduler")) is None:
        return scheduler
    config = {"_class_name": type(scheduler).__name__, **scheduler.config}
    return make(drawing_config(config, name))
