"""The reference: forward, backward and update written out in float32 PyTorch on the CPU.

Nothing of a runtime is used here, only the host's batches (which are tested on their own) and
diffusers' models. Every runtime must follow the trajectories that this loop makes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conformance.predict_families import PREDICT
from jobs import loader_of
from numpy.typing import NDArray

from configs.settings.train import Train
from runtimes.learning_rate import learning_rate
from runtimes.process.job import TrainJob

Weights = dict[str, NDArray[np.float32]]
Figures = dict[str, float]  # of a step: loss, and grad_norm before clipping


class Plain:
    """A training run, step by step.

    Args:
        denoiser: a diffusers model in float32; what of it requires a gradient is trained.
        base: a second model, which predicts the targets of prior rows.
    """

    def __init__(
        self, job: TrainJob, denoiser: torch.nn.Module, base: torch.nn.Module | None = None
    ) -> None:
        self.base = base
        self.settings = Train(**job.train)
        self.batch = loader_of(job).batch
        self.denoiser = denoiser.train()
        self.trained = {n: p for n, p in denoiser.named_parameters() if p.requires_grad}
        self.average = {name: p.detach().clone() for name, p in self.trained.items()}
        self.averaged_steps = 0
        self.optimizer = torch.optim.AdamW(
            self.trained.values(),
            betas=self.settings.adam_betas,
            eps=self.settings.adam_epsilon,
            weight_decay=self.settings.weight_decay,
            foreach=False,
            fused=False,
        )

    def train(self) -> list[Figures]:
        """Train to the end; the figures of every step."""
        return [self.step(step) for step in range(self.settings.steps)]

    def step(self, step: int) -> Figures:
        """One optimizer step on the whole batch at once; its loss, and its gradient's norm."""
        batch = self.batch(step)
        given = {name: torch.from_numpy(array) for name, array in batch.conditioning.items()}
        noisy, timesteps = torch.from_numpy(batch.noisy_latents), torch.from_numpy(batch.timesteps)
        prediction = predict(self.denoiser, noisy, timesteps, given)
        target = torch.from_numpy(batch.target)
        if batch.is_prior is not None and self.base is not None:
            with torch.no_grad():
                predicted = predict(self.base, noisy, timesteps, given)
            target = torch.where(
                torch.from_numpy(batch.is_prior)[:, None, None, None], predicted, target
            )
        losses = (prediction - target) ** 2
        if batch.huber_delta is not None:  # as kohya's sd-scripts write it
            delta = torch.from_numpy(batch.huber_delta).view(-1, 1, 1, 1)
            losses = 2 * delta * (torch.sqrt(losses + delta**2) - delta)
        if batch.loss_mask is not None:
            losses = losses * torch.from_numpy(batch.loss_mask)[:, None]
        loss = (losses.mean(dim=(1, 2, 3)) * torch.from_numpy(batch.weight)).mean()
        loss.backward()
        most = self.settings.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(
            self.trained.values(), math.inf if most is None else most
        )
        self.optimizer.param_groups[0]["lr"] = learning_rate(step, self.settings)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._follow(step)
        return {"loss": loss.item(), "grad_norm": norm.item()}

    def _follow(self, step: int) -> None:
        """The weight average, its decay warmed up as (1 + step) / (10 + step)."""
        last = step + 1 == self.settings.steps
        if (step + 1) % self.settings.ema_every_n_steps and not last:
            return
        decay = min(self.settings.ema_decay or 0.0, (1 + step) / (10 + step))
        decay **= step + 1 - self.averaged_steps
        self.averaged_steps = step + 1
        for name, parameter in self.trained.items():
            average = self.average[name]
            average.copy_(decay * average + (1 - decay) * parameter.detach())

    def weights(self) -> Weights:
        """What is published: the average if one is kept, else the weights."""
        kept = self.trained if self.settings.ema_decay is None else self.average
        return {name: tensor.detach().numpy() for name, tensor in kept.items()}


def predict(
    denoiser: torch.nn.Module,
    noisy: torch.Tensor,
    timesteps: torch.Tensor,
    given: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """The model's prediction, called as the diffusers pipelines call it."""
    if "inpainting" in given:  # as StableDiffusionInpaintPipeline
        noisy = torch.cat([noisy, given["inpainting"]], dim=1)
    if (called := PREDICT.get(type(denoiser))) is not None:
        return called(denoiser, noisy, timesteps, given)
    return denoiser(noisy, timestep=timesteps, **_keywords(given)).sample


def _keywords(given: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    keywords: dict[str, Any] = {"encoder_hidden_states": given["prompt_embeds"]}
    if "aesthetic_score" in given:
        keywords["class_labels"] = given["aesthetic_score"]
    if "add_time_ids" in given:  # SDXL
        added = {"text_embeds": given["pooled_prompt_embeds"], "time_ids": given["add_time_ids"]}
        return keywords | {"added_cond_kwargs": added}
    if "pooled_prompt_embeds" in given:  # SD3
        return keywords | {"pooled_projections": given["pooled_prompt_embeds"]}
    return keywords


def read_weights(path: Path) -> Weights:
    """A safetensors file as arrays."""
    from safetensors.numpy import load_file

    return load_file(path)
