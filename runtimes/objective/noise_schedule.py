"""Noise schedules: the forward process of diffusion and of rectified flow, and their targets.

Both schedules are tables over T noise levels, in order of increasing noise. A `level` is a row
index in [0, T); its `timestep` is the denoiser's input for that level. Dynamic shifting moves a
flow's noise levels by the size of the picture.

A trained model has the base's scheduler config, with the changes from the settings. Another
prediction type or zero terminal SNR changes the model's noise schedule. Training, sampling and the
published scheduler_config.json must all use the changed config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from artifacts.records import parse_json
from configs.errors import Refused
from configs.settings.train import Train

Array = NDArray[np.float32]


@dataclass(frozen=True)
class ResolutionShift:
    """Dynamic shifting of a flow's sigmas: larger pictures need more noise (SD3, section 5.3.2).

    mu is linear in the number of image tokens, as in diffusers' `calculate_shift`. Sampling may
    also stretch its few sigmas to end at `shift_terminal` (0.02 for Qwen-Image), training does not.
    """

    base_tokens: int
    max_tokens: int
    base_shift: float  # mu at base_tokens
    max_shift: float  # mu at max_tokens
    exponential: bool  # else linear: the factor is mu, not exp(mu)
    patch: int  # latent pixels along one side of a token

    @classmethod
    def from_config(cls, config: Mapping[str, Any], patch: int) -> ResolutionShift | None:
        """From a diffusers scheduler's config; None without dynamic shifting."""
        if not config.get("use_dynamic_shifting"):
            return None
        return cls(
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
            config.get("time_shift_type", "exponential") == "exponential",
            patch,
        )

    def mu(self, height: int, width: int) -> float:
        """The shift that the pipeline passes to the scheduler for latents [C, height, width]."""
        tokens = (height // self.patch) * (width // self.patch)
        return self.mu_of(tokens)

    def mu_of(self, tokens: int) -> float:
        """The same for a number of image tokens."""
        slope = (self.max_shift - self.base_shift) / (self.max_tokens - self.base_tokens)
        return tokens * slope + self.base_shift - slope * self.base_tokens

    def shifted(self, sigmas: Array, mu: float) -> Array:
        """sigma' = m / (m + 1 / sigma - 1) [T] f32, where m is exp(mu) or mu."""
        factor = np.exp(mu) if self.exponential else mu
        return (factor / (factor + (1 / sigmas.astype(np.float64) - 1))).astype(np.float32)


Levels = NDArray[np.int32]

#: Largest num_train_timesteps of a config; published models have 1000.
MOST_TIMESTEPS = 100_000
DIFFUSION = ("epsilon", "v_prediction", "sample")
FLOW = "flow"


@dataclass(frozen=True)
class NoiseSchedule:
    """The forward process q(z_t | z) = N(alpha_t z, sigma_t^2) (DDPM, arXiv 2006.11239).

    alpha_t^2 = alphas_cumprod[t], sigma_t^2 = 1 - alpha_t^2, SNR(t) = alpha_t^2 / sigma_t^2.
    """

    alphas_cumprod: Array  # [T]
    prediction_type: str  # one of DIFFUSION

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> NoiseSchedule:
        """From a diffusers scheduler's config. Raises Refused for an unknown schedule."""
        kind = config.get("prediction_type", "epsilon")
        if kind not in DIFFUSION:
            known = ", ".join(DIFFUSION)
            raise Refused(f"the scheduler's prediction_type {kind!r} is not known ({known})")
        betas = _betas(config)
        if config.get("rescale_betas_zero_snr"):
            betas = rescale_zero_terminal_snr(betas)
        return cls(_cumprod(betas), kind)

    def __len__(self) -> int:
        return len(self.alphas_cumprod)

    def timesteps(self, levels: Levels) -> NDArray[np.int32]:
        """The denoiser's timesteps [B] i32, equal to the levels."""
        return levels.astype(np.int32)

    def coefficients(self, levels: Levels) -> tuple[Array, Array]:
        """alpha_t and sigma_t, each [B, 1, 1, 1] f32."""
        a2 = self.alphas_cumprod[levels][:, None, None, None]
        return np.sqrt(a2), np.sqrt(1 - a2)

    def add_noise(self, latents: Array, noise: Array, levels: Levels) -> Array:
        """z_t = alpha_t z + sigma_t eps; all [B, C, h, w] f32, levels [B]."""
        alpha, sigma = self.coefficients(levels)
        return alpha * latents + sigma * noise

    def target(self, latents: Array, noise: Array, levels: Levels) -> Array:
        """The denoiser's target [B, C, h, w] f32 at noise levels [B].

        * epsilon: the noise (DDPM, arXiv 2006.11239);
        * sample: the latents;
        * v_prediction: alpha_t eps - sigma_t z (arXiv 2202.00512, appendix D).

        Args:
            latents: z [B, C, h, w].
            noise: eps [B, C, h, w].
        """
        if self.prediction_type == "epsilon":
            return noise
        if self.prediction_type == "sample":
            return latents
        alpha, sigma = self.coefficients(levels)
        return alpha * noise - sigma * latents

    def snr(self, levels: Levels) -> Array:
        """SNR(t) [B] f32; infinite where alphas_cumprod is 1."""
        a2 = self.alphas_cumprod[levels]
        return a2 / (1 - a2)


@dataclass(frozen=True)
class FlowSchedule:
    """The straight paths z_t = (1 - sigma) z + sigma eps (rectified flow, arXiv 2209.03003)."""

    sigmas: Array  # [T], rising to 1
    prediction_type: str = FLOW

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> FlowSchedule:
        """The training sigmas of a diffusers FlowMatchEulerDiscreteScheduler, from its config.

        A `shift` above 1 increases all sigmas (SD3, arXiv 2403.03206, section 5.3.2). With dynamic
        shifting, diffusers shifts in set_timesteps only, so the training sigmas are unshifted.
        """
        count = config.get("num_train_timesteps", 1000)
        shift = 1.0 if config.get("use_dynamic_shifting") else config.get("shift", 1.0)
        even = np.linspace(1, count, count, dtype=np.float32) / np.float32(count)
        return cls(shift * even / (1 + (shift - 1) * even))

    def __len__(self) -> int:
        return len(self.sigmas)

    def shifted(self, shift: ResolutionShift, height: int, width: int) -> FlowSchedule:
        """The schedule with sigmas shifted as for sampling latents [C, height, width]."""
        return FlowSchedule(shift.shifted(self.sigmas, shift.mu(height, width)))

    def timesteps(self, levels: Levels) -> Array:
        """The denoiser's timesteps [B] f32: T sigma."""
        return self.sigmas[levels] * np.float32(len(self))

    def add_noise(self, latents: Array, noise: Array, levels: Levels) -> Array:
        """z_t = (1 - sigma) z + sigma eps; all [B, C, h, w] f32, levels [B]."""
        sigma = self.sigmas[levels][:, None, None, None]
        return (1 - sigma) * latents + sigma * noise

    def target(self, latents: Array, noise: Array, levels: Levels) -> Array:
        """The velocity eps - z [B, C, h, w] f32, the same at every level (arXiv 2209.03003)."""
        return noise - latents


Schedule = NoiseSchedule | FlowSchedule


def schedule_facts(schedule: Schedule) -> dict[str, Any]:
    """A schedule as JSON. Equal results mean equal noise levels and equal targets."""
    return {name: np.asarray(fact).tolist() for name, fact in vars(schedule).items()}


def is_flow(config: Mapping[str, Any]) -> bool:
    """Whether a diffusers scheduler's config is for flow matching."""
    return str(config.get("_class_name", "")).startswith("FlowMatch")


def schedule_of(config: Mapping[str, Any]) -> Schedule:
    """The noise schedule of a diffusers scheduler's config.

    Raises:
        Refused, ValueError, TypeError, OverflowError: the schedule is unknown, or a setting is
            invalid.
    """
    count = config.get("num_train_timesteps", 1000)
    if type(count) is not int or not 0 < count <= MOST_TIMESTEPS:
        raise Refused(f"num_train_timesteps is {count!r}, not 1 to {MOST_TIMESTEPS:,}")
    schedule: Schedule
    with np.errstate(all="ignore"):
        if is_flow(config):
            schedule = FlowSchedule.from_config(config)
            table = schedule.sigmas
        elif config.get("beta_schedule") is None and config.get("trained_betas") is None:
            name = config.get("_class_name", "without a class")
            raise Refused(f"the scheduler {name} is not known here: it has no beta_schedule")
        else:
            schedule = NoiseSchedule.from_config(config)
            table = schedule.alphas_cumprod
    if not ((table >= 0) & (table <= 1 + 1e-6)).all():
        raise Refused("the scheduler's settings give noise levels outside of 0 to 1")
    return schedule


def _betas(config: Mapping[str, Any]) -> Array:
    """beta_t [T] f32, with the formulas of diffusers' schedulers."""
    if config.get("trained_betas") is not None:
        betas = np.asarray(config["trained_betas"], np.float32)
        if betas.ndim != 1 or not len(betas):
            raise Refused("the scheduler's trained_betas are no list of numbers")
        return betas
    count = config.get("num_train_timesteps", 1000)
    kind = config.get("beta_schedule", "linear")
    first = config.get("beta_start", 0.0001)
    last = config.get("beta_end", 0.02)
    if kind == "linear":
        return _linspace(first, last, count)
    if kind == "scaled_linear":  # latent diffusion (arXiv 2112.10752): linear in sqrt(beta)
        return _linspace(first**0.5, last**0.5, count) ** 2
    if kind == "squaredcos_cap_v2":  # improved DDPM (arXiv 2102.09672), equation 17
        at = (np.arange(count + 1) / count + 0.008) / 1.008
        bar = np.cos(at * np.pi / 2) ** 2
        return np.minimum(1 - bar[1:] / bar[:-1], 0.999).astype(np.float32)
    known = "linear, scaled_linear, squaredcos_cap_v2"
    raise Refused(f"the scheduler's beta_schedule {kind!r} is not known (known: {known})")


def _linspace(first: float, last: float, count: int) -> Array:
    """torch.linspace in float32, bit for bit: PyTorch computes each half from its own end."""
    steps = np.arange(count)
    low, high = map(np.float32, (first, last))
    by = np.float64((high - low) / np.float32(count - 1))
    rising = low + by * steps
    falling = high - by * (count - 1 - steps)
    return np.where(steps < count // 2, rising, falling).astype(np.float32)


def _cumprod(betas: Array) -> Array:
    return np.cumprod((np.float32(1) - betas).astype(np.float64)).astype(np.float32)


def rescale_zero_terminal_snr(betas: Array) -> Array:
    """beta_t [T] f32 such that the last alpha_t is 0, by shifting and scaling sqrt(alphas_cumprod).

    arXiv 2305.08891, algorithm 1. The conversion to betas and back rounds; it is kept because
    diffusers has it, and models are trained with the rounded values.
    """
    alpha = np.sqrt(_cumprod(betas))
    first = alpha[0]
    last = alpha[-1]
    alpha = (alpha - last) * (first / (first - last))
    bar = alpha * alpha
    return (1 - np.append(bar[:1], bar[1:] / bar[:-1])).astype(np.float32)


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
#: Keys of SCHEDULERS without rescale_betas_zero_snr, and without prediction_type `sample`.
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
    """Read scheduler_config.json from a scheduler's folder. Raises Refused."""
    path = folder / SCHEDULER_FILE
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Refused(f"{path} is missing: the noise schedule is read from it") from None
    except (OSError, ValueError) as error:
        raise Refused(f"{path}: {error}") from None
    if not isinstance(config, dict):
        raise Refused(f"{path}: not a scheduler's config")
    kind = config.get("_class_name", "none")
    if not (isinstance(kind, str) and kind.isidentifier()):  # the card's code imports it
        raise Refused(f"{path}: {kind!r} is no name of a class: the model may be hostile")
    return config


def scheduler_config(base: Mapping[str, Any], settings: Train) -> dict[str, Any]:
    """The scheduler config of the trained model; equal to the base's without changes.

    DDIMScheduler, with the same noise schedule, replaces a class that lacks a changed option. Zero
    terminal SNR needs trailing timesteps (arXiv 2305.08891, section 3.3).

    Raises:
        Refused: the settings turn a diffusion model into a flow model, or the reverse.
    """
    name = base.get("_class_name")
    kind = settings.prediction_type
    zero_snr = settings.zero_terminal_snr
    if is_flow(base):
        if kind not in (None, FLOW):
            raise Refused(
                f"train.prediction_type: {kind}, but the base is a flow ({name}): leave it null"
            )
        if zero_snr is not None:
            raise Refused(
                f"train.zero_terminal_snr is for diffusion, and the base is a flow ({name}), which "
                "always ends in pure noise: set it to null"
            )
        return dict(base)
    if kind == FLOW:
        raise Refused(
            "train.prediction_type: flow needs a base with a FlowMatch scheduler, "
            f"this one's is {name}"
        )
    changed = {
        **({} if kind is None else {"prediction_type": kind}),
        **({} if zero_snr is None else {"rescale_betas_zero_snr": zero_snr}),
        **({"timestep_spacing": "trailing"} if zero_snr else {}),
    }
    if (zero_snr and name not in RESCALES_BETAS) or (
        kind == "sample" and name not in PREDICTS_SAMPLE
    ):
        kept = {setting: base[setting] for setting in _KEPT if setting in base}
        base = {"_class_name": FALLBACK, **kept, "clip_sample": False}
    return {**base, **changed}


def read_schedule(folder: Path, settings: Train | None = None) -> Schedule:
    """The noise schedule of a scheduler's folder, with the changes from the settings, if any.

    Raises:
        Refused: the config is missing or unknown, or the settings contradict it.
    """
    config = read_scheduler_config(folder)
    if settings is not None:
        config = scheduler_config(config, settings)
    try:
        return schedule_of(config)
    except (ValueError, TypeError, OverflowError) as error:
        raise Refused(f"{folder / SCHEDULER_FILE}: {error}") from None


def trained_scheduler_config(base: Mapping[str, Any], settings: Train) -> dict[str, Any] | None:
    """The trained model's scheduler config; None if it equals the base's."""
    config = scheduler_config(base, settings)
    defaults = {"prediction_type": "epsilon", "rescale_betas_zero_snr": False}
    return None if {**defaults, **config} == {**defaults, **base} else config


def drawing_config(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """`config` with the class of another scheduler, and the same noise schedule.

    Args:
        config: config of the model's own scheduler.
        name: a key of SCHEDULERS.

    Raises:
        Refused: one scheduler is for flow matching, the other for diffusion, or scheduler `name`
            lacks the model's noise schedule or prediction type.
    """
    kind = SCHEDULERS[name]
    if is_flow({"_class_name": kind}) != is_flow(config):
        raise Refused(
            f"scheduler {name} is not for this model, whose own is {config.get('_class_name')}"
        )
    for needed, lacking, what in (
        (config.get("rescale_betas_zero_snr"), NO_ZERO_SNR, "zero terminal SNR"),
        (config.get("prediction_type") == "sample", NO_SAMPLE, "prediction_type sample"),
    ):
        if needed and name in lacking:
            others = [key for key in SCHEDULERS if key not in (*lacking, "flow_euler")]
            raise Refused(
                f"scheduler {name} cannot draw a model with {what}: choose one of "
                f"{', '.join(others)}"
            )
    return {**config, "_class_name": kind, "clip_sample": False}


def sampling_scheduler(
    scheduler: Any, sampler: Mapping[str, Any], make: Callable[[dict[str, Any]], Any]
) -> Any:
    """The scheduler for sampling: the sampler's choice, or the model's own.

    Args:
        scheduler: the model's own, of diffusers or mindone.
        sampler: as GenerateJob.sampler.
        make: constructs a scheduler from a config.

    Raises:
        Refused: the chosen scheduler does not fit the model.
    """
    if (name := sampler.get("scheduler")) is None:
        return scheduler
    config = {"_class_name": type(scheduler).__name__, **scheduler.config}
    return make(drawing_config(config, name))
