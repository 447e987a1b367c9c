"""The denoiser's target by prediction type: epsilon, v-prediction, sample or flow."""

from __future__ import annotations

from runtimes.objective.noise_schedule import Array, FlowSchedule, Levels, Schedule


def target_of(schedule: Schedule, latents: Array, noise: Array, levels: Levels) -> Array:
    """The denoiser's target [B, C, h, w] f32 at noise levels [B].

    * epsilon: the noise (DDPM, arXiv 2006.11239);
    * sample: the latents;
    * v_prediction: alpha_t eps - sigma_t z (arXiv 2202.00512, appendix D);
    * flow: the velocity eps - z, the same at every level (arXiv 2209.03003).

    Args:
        latents: z [B, C, h, w].
        noise: eps [B, C, h, w].
    """
    if isinstance(schedule, FlowSchedule):
        return noise - latents
    if schedule.prediction_type == "epsilon":
        return noise
    if schedule.prediction_type == "sample":
        return latents
    alpha, sigma = schedule.coefficients(levels)
    return alpha * noise - sigma * latents
