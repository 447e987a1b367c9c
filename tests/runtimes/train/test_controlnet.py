"""A ControlNet: trained as by the script of diffusers, and published as diffusers loads it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ControlNetModel, UNet2DConditionModel
from jobs import MakeJob, loader_of
from safetensors.numpy import load_file
from training import RecordedEvents, history, results, train

from configs.settings.train import Train
from runtimes.contract import StepBatch
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import TrainJob
from runtimes.torch_models.control_network import new_control
from runtimes.train import training_loop

#: Relative; a batch is one micro-batch on both sides.
TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-4
GROUPS = [{"train/8x8": 9, "train/4x12": 3, "holdout/8x8": 2}]


@pytest.fixture
def make_control_job(make_job: MakeJob, tmp_path: Path, write_latents: Any) -> MakeJob:
    latents = write_latents(tmp_path / "controlled", GROUPS, control=True)

    def make(name: str, **settings: Any) -> TrainJob:
        settings = {"steps": 20, "learning_rate": 1e-3, **settings}
        return replace(make_job(name, method="controlnet", **settings), latents=latents)

    return make


class Script:
    """The loop of train_controlnet_sdxl.py in float32, on the batches of a job."""

    def __init__(self, job: TrainJob) -> None:
        self.settings = Train(**job.train)
        self.batch = loader_of(job).batch
        folder = Path(job.model) / "unet"
        self.unet: Any = UNet2DConditionModel.from_pretrained(folder).requires_grad_(False)
        # The tiny VAE reduces a side to a fourth, not to an eighth.
        channels = (16, 32, 96)
        self.control: Any = ControlNetModel.from_unet(
            self.unet, conditioning_embedding_out_channels=channels
        )
        own = new_control(Base.of(job), self.settings)  # whose embedding of pictures is random
        embedding = "controlnet_cond_embedding."
        drawn = {n: t for n, t in own.state_dict().items() if n.startswith(embedding)}
        self.control.load_state_dict(drawn, strict=False)
        self.control.train()

    def train(self) -> tuple[list[float], list[float]]:
        parameters = list(self.control.parameters())
        rate, decay = self.settings.learning_rate, self.settings.weight_decay
        optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=decay, foreach=False)
        losses, norms = [], []
        for step in range(self.settings.steps):
            loss = self._loss(self.batch(step))
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, norms

    def _loss(self, batch: StepBatch) -> torch.Tensor:
        given = {name: torch.from_numpy(array) for name, array in batch.conditioning.items()}
        noisy, timesteps = torch.from_numpy(batch.noisy_latents), torch.from_numpy(batch.timesteps)
        embeds = given["prompt_embeds"]
        added = {"text_embeds": given["pooled_prompt_embeds"], "time_ids": given["add_time_ids"]}
        down, middle = self.control(
            noisy,
            timesteps,
            encoder_hidden_states=embeds,
            added_cond_kwargs=added,
            controlnet_cond=given["control"],
            return_dict=False,
        )
        predicted = self.unet(
            noisy,
            timesteps,
            encoder_hidden_states=embeds,
            added_cond_kwargs=added,
            down_block_additional_residuals=list(down),
            mid_block_additional_residual=middle,
            return_dict=False,
        )[0]
        target = torch.from_numpy(batch.target)
        return torch.nn.functional.mse_loss(predicted.float(), target.float(), reduction="mean")


def test_twenty_steps_have_the_losses_and_gradients_of_the_script_of_diffusers(
    make_control_job: MakeJob,
) -> None:
    job = make_control_job("run")
    script = Script(job)
    assert train(job) == 0
    losses, norms = script.train()
    assert [line["loss"] for line in history(job)] == pytest.approx(losses, rel=TOLERANCE)
    assert [line["grad_norm"] for line in history(job)] == pytest.approx(norms, rel=NORM_TOLERANCE)
    written = load_file(Path(job.out) / "controlnet/diffusion_pytorch_model.safetensors")
    expected = script.control.state_dict()
    assert written.keys() == expected.keys()
    for name, array in written.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-3, atol=2e-4)
    loaded: Any = ControlNetModel.from_pretrained(Path(job.out) / "controlnet")
    assert loaded.config.block_out_channels == script.control.config.block_out_channels
    assert not (Path(job.out) / "unet").exists()


def test_at_step_0_it_has_no_effect_and_the_denoiser_never_changes(
    make_control_job: MakeJob, tiny_sdxl: Path
) -> None:
    from jobs import predicted, start

    job = make_control_job("run", ema_decay=0.5)
    runtime, batch = start(job)
    network = runtime._network
    first = batch(0)
    without = replace(first, conditioning={**first.conditioning})
    del without.conditioning["control"]
    assert torch.equal(predicted(network, first), predicted(network, without))
    before = {n: p.clone() for n, p in network.denoiser.named_parameters()}
    for step in range(3):
        runtime.step(batch(step), 3e-2)
    assert not torch.equal(predicted(network, first), predicted(network, without))
    assert all(torch.equal(p, before[n]) for n, p in network.denoiser.named_parameters())
    state = runtime.state()
    for group in ("weights", "ema"):
        assert {name.partition(".")[0] for name in state[group]} == {"controlnet"}


def test_training_starts_with_the_controlnet_of_a_folder(make_control_job: MakeJob) -> None:
    from jobs import start

    first = make_control_job("first", steps=2)
    train(first)
    folder = Path(first.out) / "controlnet"
    runtime, _ = start(replace(make_control_job("second"), control_start=str(folder)))
    weights = runtime.state()["weights"]
    written = load_file(folder / "diffusion_pytorch_model.safetensors")
    assert {name.partition(".")[2] for name in weights} == written.keys()
    for name, array in written.items():
        np.testing.assert_array_equal(np.asarray(weights[f"controlnet.{name}"]), array)
    assert any(written[name].any() for name in written if "controlnet_mid_block" in name)


@pytest.mark.parametrize("more", [{}, {"mixed_precision": "bf16"}], ids=["float32", "bf16"])
def test_a_stopped_run_ends_as_an_uninterrupted_one(
    make_control_job: MakeJob, more: dict[str, Any]
) -> None:
    settings = {
        **{"steps": 8, "checkpointing_steps": 3, "logging_steps": 1, "ema_decay": 0.9},
        **{"gradient_checkpointing": "blocks", "micro_batch_size": 1, **more},
    }
    whole = make_control_job("whole", **settings)
    train(whole)
    job = make_control_job("stopped", **settings)
    events = RecordedEvents(until=("progress", 4))
    assert not training_loop.train(job, events, events.stop)
    assert train(job) >= 4
    assert results(job) == results(whole)
