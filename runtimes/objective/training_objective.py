"""The training objective: latents, noise, timesteps, targets and loss weights of a batch.

A loss weight is the factor of a sample's squared error, by its noise level. The papers define
weights for the error of the latents, |z' - z|^2. The error of eps is SNR times that, the error of v
is SNR + 1 times that. The weight is divided by this factor, so that the loss is the same for every
prediction type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from artifacts.latent_shards import LatentScale
from configs.errors import Refused
from configs.settings.train import Train
from configs.settings.train_parts import Huber, TimestepSampling
from runtimes.objective import noise_schedule, random_draws
from runtimes.objective.random_draws import Stream, draw_normal

Array = NDArray[np.float32]
FlowWeighting = Literal["none", "sigma_sqrt", "cosmap"]


def loss_weight(
    schedule: noise_schedule.Schedule,
    levels: noise_schedule.Levels,
    *,
    snr_gamma: float | None = None,
    debiased_estimation_loss: bool = False,
    weighting_scheme: FlowWeighting = "none",
) -> Array:
    """Loss weight per sample [B] f32; 1 without an option for this kind of schedule."""
    if isinstance(schedule, noise_schedule.FlowSchedule):
        return flow_weight(schedule.sigmas[levels], weighting_scheme)
    if snr_gamma is not None:
        return min_snr_weight(_snr(schedule, levels), snr_gamma, schedule.prediction_type)
    if debiased_estimation_loss:
        return debiased_weight(_snr(schedule, levels), schedule.prediction_type)
    return np.ones(len(levels), np.float32)


def min_snr_weight(snr: Array, gamma: float, prediction_type: str) -> Array:
    """Min-SNR-gamma weights [B] (arXiv 2303.09556), finite at SNR 0.

    min(SNR, gamma) for sample, divided by SNR for epsilon and by SNR + 1 for v_prediction.
    """
    if prediction_type == "v_prediction":
        return np.divide(np.minimum(snr, np.float32(gamma)), snr + 1, dtype=np.float32)
    if prediction_type == "sample":
        return np.minimum(snr, np.float32(gamma))
    with np.errstate(divide="ignore"):
        return np.minimum(np.float32(1), np.float32(gamma) / snr)


def debiased_weight(snr: Array, prediction_type: str) -> Array:
    """Debiased estimation weights [B] (arXiv 2310.08442).

    1 / sqrt(SNR) for epsilon, sqrt(SNR) for sample, sqrt(SNR) / (SNR + 1) for v_prediction. The
    last is 0 at SNR 0; the objective rejects epsilon there.
    """
    root: Array = np.sqrt(snr, dtype=np.float32)
    if prediction_type == "v_prediction":
        divided = np.divide(root, snr + 1, dtype=np.float32)
        return np.where(np.isinf(snr), np.float32(0), divided)
    return root if prediction_type == "sample" else np.reciprocal(root)


def flow_weight(sigma: Array, kind: FlowWeighting) -> Array:
    """Weights [B] of rectified flow for sigma [B] in (0, 1] (SD3, arXiv 2403.03206, section 3.1).

    sigma_sqrt, a name of diffusers, is sigma^-2; cosmap is 2 / (pi - 2 pi sigma + 2 pi sigma^2).
    """
    if kind == "sigma_sqrt":
        return sigma**-2
    if kind == "cosmap":
        return np.float32(2 / np.pi) / (1 - 2 * sigma + 2 * sigma**2)
    return np.ones_like(sigma)


def huber_delta(
    schedule: noise_schedule.Schedule, levels: noise_schedule.Levels, settings: Huber
) -> Array:
    """Pseudo-Huber's delta per sample [B] f32, as `huber_c` in kohya's sd-scripts.

    constant: delta scale; exponential: delta^(t / T) scale; snr: (1 - delta) / (1 + sigma)^2 +
    delta, where sigma^2 = 1 / SNR.
    """
    delta = np.float64(settings.delta)
    if settings.schedule == "constant":
        found = np.full(len(levels), delta * settings.scale)
    elif settings.schedule == "exponential":
        found = delta ** (schedule.timesteps(levels) / len(schedule)) * settings.scale
    else:
        assert isinstance(schedule, noise_schedule.NoiseSchedule)
        with np.errstate(divide="ignore"):  # zero terminal SNR
            sigma = 1 / np.sqrt(_snr(schedule, levels))
        found = (1 - delta) / (1 + sigma) ** 2 + delta
    return np.asarray(found, np.float32)


def elementwise_loss(squares: Any, delta: Any = None, mask: Any = None) -> Any:
    """Losses [B, C, h, w] of squared errors, in the arrays of any framework.

    Pseudo-Huber is a factor of the square: 2 d (sqrt(e^2 + d^2) - d) = 2 d e^2 / (sqrt(e^2 + d^2)
    + d), which keeps its digits where e is small.

    Args:
        squares: squared errors [B, C, h, w] f32.
        delta: [B] f32; None: the squares.
        mask: factor of the loss at each position [B, h, w] f32; None: 1.
    """
    if delta is not None:
        wide = delta[:, None, None, None]
        squares = squares * (2 * wide / ((squares + wide * wide) ** 0.5 + wide))
    return squares if mask is None else squares * mask[:, None]


def _snr(schedule: noise_schedule.NoiseSchedule, levels: noise_schedule.Levels) -> Array:
    with np.errstate(divide="ignore"):  # SNR is infinite without noise
        return schedule.snr(levels)


@dataclass(frozen=True)
class NoisedBatch:
    """The arrays of a batch that depend on noise. StepBatch has the shapes and dtypes."""

    noisy_latents: Array
    timesteps: NDArray[np.int32] | Array
    target: Array
    weight: Array
    huber_delta: Array | None


@dataclass(frozen=True)
class Objective:
    """The training objective. Its random numbers depend on (seed, sample counter) alone.

    Raises:
        Refused: settings contradict the schedule or each other.
    """

    schedule: noise_schedule.Schedule
    scale: LatentScale
    seed: int
    snr_gamma: float | None = None
    debiased_estimation_loss: bool = False
    weighting_scheme: FlowWeighting = "none"
    loss: Literal["mse", "huber", "smooth_l1"] = "mse"
    huber: Huber = field(default_factory=Huber)
    noise_offset: float = 0.0
    input_perturbation: float = 0.0
    sampling: TimestepSampling = field(default_factory=TimestepSampling)
    resolution_shift: noise_schedule.ResolutionShift | None = None  # of a flow
    caption_dropout_rate: float = 0.0
    #: Replace random noise levels: the middles of so many equal bands, by turns of the counter.
    equidistant_levels: int | None = None
    _bounds: random_draws.Probabilities | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        schedule = self.schedule
        if isinstance(schedule, noise_schedule.FlowSchedule):
            for name in ("snr_gamma", "debiased_estimation_loss"):
                if getattr(self, name):
                    raise Refused(
                        f"train.{name} weighs diffusion by its SNR, and the base is a flow: use "
                        "train.weighting_scheme"
                    )
            if self.loss != "mse" and self.huber.schedule == "snr":
                raise Refused(
                    "train.huber.schedule: snr is of diffusion, and the base is a flow: set "
                    "exponential or constant"
                )
        elif self.weighting_scheme != "none":
            raise Refused(
                f"train.weighting_scheme: {self.weighting_scheme} is for flow matching, and the "
                "base's scheduler is for diffusion: use train.snr_gamma or "
                "train.debiased_estimation_loss"
            )
        elif schedule.prediction_type == "epsilon" and schedule.alphas_cumprod[-1] == 0:
            raise Refused(
                "prediction_type epsilon cannot go with zero terminal SNR (train.zero_terminal_snr "
                "or the scheduler's rescale_betas_zero_snr): at the noisiest level the input "
                "equals epsilon, a trivial prediction; set train.prediction_type to v_prediction"
            )
        bounds = random_draws.level_bounds(self.sampling, len(self.schedule))
        object.__setattr__(self, "_bounds", bounds)

    @classmethod
    def of(
        cls,
        settings: Train,
        schedule: noise_schedule.Schedule,
        scale: LatentScale,
        resolution_shift: noise_schedule.ResolutionShift | None = None,
    ) -> Objective:
        """The objective of train settings.

        Args:
            resolution_shift: resolution shift of the base's scheduler, if any.

        Raises:
            Refused: the settings contradict each other or the schedule.
        """
        shifts = settings.timesteps.resolution_shift
        if shifts and resolution_shift is None:
            raise Refused(
                "train.timesteps.resolution_shift: the base's scheduler has no "
                "use_dynamic_shifting: set false"
            )
        return cls(
            schedule=schedule,
            scale=scale,
            seed=settings.seed,
            snr_gamma=settings.snr_gamma,
            debiased_estimation_loss=settings.debiased_estimation_loss,
            weighting_scheme=settings.weighting_scheme,
            loss=settings.loss,
            huber=settings.huber,
            noise_offset=settings.noise_offset,
            input_perturbation=settings.input_perturbation,
            sampling=settings.timesteps,
            resolution_shift=resolution_shift if shifts else None,
            caption_dropout_rate=settings.caption_dropout_rate,
        )

    def held_out(self, seed: int) -> Objective:
        """The objective for measurement: uniform timesteps, no caption dropout, squared errors."""
        return Objective(self.schedule, self.scale, seed, noise_offset=self.noise_offset)

    def choices(
        self, counters: Sequence[int], dropout_rates: Sequence[float | None] = ()
    ) -> list[random_draws.Choices]:
        """The random choices for the samples at `counters`.

        Args:
            dropout_rates: caption dropout of each sample; None: the objective's own.
        """
        levels = len(self.schedule)
        bands = self.equidistant_levels
        rngs = random_draws.generators(self.seed, Stream.CHOICES, counters)
        own = self.caption_dropout_rate
        rates = dropout_rates or [None] * len(counters)
        choices = []
        for counter, rate, rng in zip(counters, rates, rngs, strict=True):
            u, caption, dropout, flip, mask = rng.random(5).tolist()
            if bands is not None:
                level = (2 * (counter % bands) + 1) * levels // (2 * bands)
            elif self._bounds is None:
                level = int(u * levels)
            else:
                level = random_draws.level_at(u, self._bounds)
            dropped = dropout < (own if rate is None else rate)
            choices.append(random_draws.Choices(level, caption, dropped, flip, mask))
        return choices

    def noise(self, counters: Sequence[int], shape: tuple[int, ...]) -> Array:
        """eps [B, C, h, w] f32 of the samples at `counters`; shape is (C, h, w).

        A noise offset shifts each channel at random (N. Guttenberg, "Diffusion with offset noise",
        2023).
        """
        noise = draw_normal(self.seed, Stream.NOISE, counters, shape)
        if self.noise_offset:
            shift = draw_normal(self.seed, Stream.NOISE_OFFSET, counters, (shape[0], 1, 1))
            noise = noise + np.float32(self.noise_offset) * shift
        return noise

    def noised(
        self, mean: Array, logvar: Array, levels: noise_schedule.Levels, counters: Sequence[int]
    ) -> NoisedBatch:
        """Draw latents and noise, and compute the arrays of a batch.

        Args:
            mean: VAE posterior mean [B, C, h, w].
            logvar: VAE posterior log-variance [B, C, h, w].
            levels: noise levels [B].
            counters: B sample counters.
        """
        shape = mean.shape[1:]
        schedule = self.schedule
        if self.resolution_shift and isinstance(schedule, noise_schedule.FlowSchedule):
            schedule = schedule.shifted(self.resolution_shift, *mean.shape[-2:])
        eps = draw_normal(self.seed, Stream.POSTERIOR, counters, shape)
        latents = self.scale.sample(mean, logvar, eps)
        noise = self.noise(counters, shape)
        perturbed = noise
        if self.input_perturbation:  # arXiv 2301.11706: the target has `noise`
            more = draw_normal(self.seed, Stream.INPUT_PERTURBATION, counters, shape)
            perturbed = noise + np.float32(self.input_perturbation) * more
        weight = self.weight(levels, schedule)
        delta = None
        if self.loss != "mse":
            delta = huber_delta(schedule, levels, self.huber)
            weight = weight / delta if self.loss == "smooth_l1" else weight
        return NoisedBatch(
            schedule.add_noise(latents, perturbed, levels),
            schedule.timesteps(levels),
            schedule.target(latents, noise, levels),
            weight,
            delta,
        )

    def weight(self, levels: noise_schedule.Levels, schedule: noise_schedule.Schedule) -> Array:
        """Loss weight per sample [B] f32 at noise levels [B] of a schedule."""
        return loss_weight(
            schedule,
            levels,
            snr_gamma=self.snr_gamma,
            debiased_estimation_loss=self.debiased_estimation_loss,
            weighting_scheme=self.weighting_scheme,
        )
