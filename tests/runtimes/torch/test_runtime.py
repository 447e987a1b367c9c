"""The torch runtime trains as a plain diffusers loop does; its state goes in and out exactly."""

import gc
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from diffusers.training_utils import EMAModel, compute_snr
from jobs import SAMPLER, MakeJob, assert_equal, loader_of, start, trained
from safetensors.torch import load_file, save_file
from tolerances import assert_close
from torch.nn.functional import mse_loss

from artifacts.latent_shards import LatentShard, from_bfloat16, open_latents
from configs.errors import Refused
from configs.settings.train import Train
from runtimes.contract import WeightsLost
from runtimes.objective.random_draws import Stream, generator
from runtimes.optimizer_state import published
from runtimes.process.job import TrainJob
from runtimes.torch import sampler as torch_sampler
from runtimes.torch.runtime import TheRuntime
from runtimes.torch.sampler import Sampler

pytestmark = pytest.mark.slow


def run(job: TrainJob, steps: int = 4) -> tuple[list[float], TheRuntime]:
    runtime, batch = start(job)
    rate = job.train["learning_rate"]
    return [float(runtime.step(batch(step), rate).loss) for step in range(steps)], runtime


def with_scheduler(model: str | Path, folder: Path, **config: object) -> str:
    shutil.copytree(model, folder)
    path = folder / "scheduler/scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return str(folder)


class Plain:
    """A training loop as diffusers' example scripts write it, on given noise and timesteps."""

    def __init__(self, job: TrainJob) -> None:
        self.settings = Train(**job.train)
        self.unet = UNet2DConditionModel.from_pretrained(job.model, subfolder="unet").train()
        self.scheduler = DDPMScheduler.from_pretrained(job.model, subfolder="scheduler")
        self.optimizer = torch.optim.AdamW(
            self.unet.parameters(), lr=self.settings.learning_rate, weight_decay=1e-2
        )
        self.order = loader_of(job).order
        self.shards = [LatentShard(ref.url) for ref in open_latents(job.latents).shards]

    def step(self, step: int) -> float:
        rows = [self.row(step * 4 + n, place) for n, place in enumerate(self.order.batch(step))]
        columns = [torch.stack(column) for column in zip(*rows, strict=True)]
        latents, noise, embeds, pooled, time_ids, timesteps = columns
        noisy = self.scheduler.add_noise(latents, noise, timesteps)
        added = {"text_embeds": pooled, "time_ids": time_ids}
        predicted = self.unet(noisy, timesteps, embeds, added_cond_kwargs=added).sample
        loss = self.loss(predicted, latents, noise, timesteps)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.unet.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def row(self, counter: int, place: tuple) -> tuple:
        def normal(stream: Stream) -> torch.Tensor:
            drawn = generator(self.settings.seed, stream, counter)
            return torch.from_numpy(drawn.standard_normal(sample.mean.shape, dtype=np.float32))

        shard = self.shards[place[0]]
        sample = shard.sample(*place[1:])
        at, caption, _ = generator(self.settings.seed, Stream.CHOICES, counter).random(3)
        text = sample.caption_rows[int(caption * len(sample.caption_rows))]
        mean, logvar = (torch.from_numpy(from_bfloat16(x)) for x in (sample.mean, sample.logvar))
        latents = (mean + torch.exp(0.5 * logvar) * normal(Stream.POSTERIOR)) * 0.5
        sizes = [*sample.original_size, *sample.crop_top_left, *sample.target_size]
        return (
            latents,
            normal(Stream.NOISE),
            torch.from_numpy(from_bfloat16(shard.prompt_embeds(text))),
            torch.from_numpy(from_bfloat16(shard.pooled_prompt_embeds(text))),
            torch.tensor(sizes).float(),
            torch.tensor(int(at * 1000)),
        )

    def loss(
        self,
        predicted: torch.Tensor,
        latents: torch.Tensor,
        noise: torch.Tensor,
        timesteps: torch.Tensor,
    ) -> torch.Tensor:
        if self.scheduler.config.prediction_type == "epsilon":
            return mse_loss(predicted, noise)
        target = self.scheduler.get_velocity(latents, noise, timesteps)
        snr = compute_snr(self.scheduler, timesteps)
        weight = torch.stack([snr, 5.0 * torch.ones_like(snr)], dim=1).min(dim=1)[0] / (snr + 1)
        each = mse_loss(predicted, target, reduction="none").mean(dim=(1, 2, 3))
        return (each * weight).mean()


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction"])
def test_losses_are_those_of_a_plain_diffusers_loop(
    make_job: MakeJob, tiny_sdxl: Path, tmp_path: Path, kind: str
) -> None:
    zero_snr = kind == "v_prediction"
    model = with_scheduler(
        tiny_sdxl, tmp_path / "model", prediction_type=kind, rescale_betas_zero_snr=zero_snr
    )
    job = make_job(model=model, snr_gamma=5.0 if zero_snr else None, learning_rate=1e-4)
    plain = Plain(job)
    expected = [plain.step(step) for step in range(10)]
    losses, _ = run(job, 10)
    assert_close(losses, expected)


def test_accumulated_gradients_are_the_whole_batch_s(make_job: MakeJob) -> None:
    whole, at_once = run(make_job(ema_decay=0.9, snr_gamma=5.0))
    parts, in_parts = run(make_job(ema_decay=0.9, snr_gamma=5.0, micro_batch_size=3))
    np.testing.assert_allclose(whole, parts, rtol=1e-5)
    for name, weight in at_once.state()["ema"].items():
        np.testing.assert_allclose(in_parts.state()["ema"][name], weight, atol=2e-4)


def test_bfloat16_computes_in_half_and_keeps_float32_weights(make_job: MakeJob) -> None:
    full, _ = run(make_job())
    half, runtime = run(make_job(mixed_precision="bf16"))
    np.testing.assert_allclose(half, full, rtol=3e-2)
    assert half != full
    assert {array.dtype for array in runtime.state()["weights"].values()} == {np.dtype("f4")}


def test_the_norm_is_reported_before_clipping(make_job: MakeJob) -> None:
    runtime, batch = start(make_job(max_grad_norm=1e-6, weight_decay=0.0))
    free, _ = start(make_job(max_grad_norm=None, weight_decay=0.0))
    norm = float(runtime.step(batch(0), 1e-3).grad_norm)
    assert norm == float(free.step(batch(0), 1e-3).grad_norm) > 0.01
    moments = runtime.state()["exp_avg"].values()
    clipped = np.sqrt(sum(float((m.astype("f8") ** 2).sum()) for m in moments)) / (1 - 0.9)
    assert clipped == pytest.approx(1e-6, rel=1e-3)


def test_the_average_warms_up(make_job: MakeJob) -> None:
    """Its decay at step s is min(decay, (1 + s) / (10 + s)): EMAModel's from the second step on."""
    runtime, batch = start(make_job(ema_decay=0.15))
    average = runtime.state()["weights"]
    for step in range(3):
        runtime.step(batch(step), 1e-3)
        decay = EMAModel([torch.zeros(1)], decay=0.15).get_decay(step + 1) or 1 / 10
        for name, weight in runtime.state()["weights"].items():
            average[name] = decay * average[name] + (1 - decay) * weight
    for name, expected in average.items():
        np.testing.assert_allclose(runtime.state()["ema"][name], expected, atol=1e-6)


def test_a_restored_runtime_goes_on_to_the_bit(make_job: MakeJob) -> None:
    job = make_job(ema_decay=0.9, snr_gamma=5.0)
    one, batch = start(job)
    for step in range(3):
        one.step(batch(step), 1e-3)
    other, _ = start(job)
    other.restore(one.state(), 3)
    for step in range(3, 6):
        one.step(batch(step), 1e-3)
        other.step(batch(step), 1e-3)
    assert_equal(one.state(), other.state())


def test_state_is_a_copy(make_job: MakeJob) -> None:
    runtime, batch = start(make_job())
    before = runtime.state()
    kept = {name: array.copy() for name, array in before["weights"].items()}
    runtime.step(batch(0), 1e-3)
    np.testing.assert_equal(before["weights"], kept)


def test_sampling_draws_with_the_average_and_leaves_the_state_alone(make_job: MakeJob) -> None:
    sampler = {"seed": 0, "num_inference_steps": 2, "guidance_scale": 3.0, "batch_size": 2}
    job = make_job(ema_decay=0.9)
    runtime, batch = start(job)
    first = runtime.sample(["a", "b"], sampler)
    assert first.shape == (2, 32, 32, 3) and first.dtype == np.uint8
    for step in range(2):
        runtime.step(batch(step), 1e-2)
    before = runtime.state()
    later = runtime.sample(["a", "b"], sampler)
    assert_equal(before, runtime.state())
    assert (later != first).any()
    averaged, _ = start(job)
    averaged.restore({**before, "weights": before["ema"]}, 2)
    np.testing.assert_array_equal(averaged.sample(["a", "b"], sampler), later)
    other, _ = start(job)
    other.restore(before, 2)
    assert float(runtime.step(batch(2), 1e-3).loss) == float(other.step(batch(2), 1e-3).loss)


def test_the_average_goes_out_again_without_memory_for_it(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, _ = trained(make_job(ema_decay=0.9))
    before = runtime.state()
    with pytest.raises(MemoryError), runtime._update.averaged():
        np.testing.assert_equal(runtime._update.state()["weights"], before["ema"])
        for name in ("clone", "empty", "empty_like"):
            monkeypatch.setattr(torch.Tensor if name == "clone" else torch, name, no_memory)
        raise MemoryError
    monkeypatch.undo()
    assert_equal(before, runtime.state())


def test_the_final_state_is_what_is_published(make_job: MakeJob) -> None:
    for ema_decay, name in ((0.9, "ema"), (None, "weights")):
        runtime, _ = trained(make_job(ema_decay=ema_decay))
        final, whole = runtime.state(published(runtime.state_shapes())), runtime.state()
        assert final.keys() == {name} | (whole.keys() & {"constants"})
        np.testing.assert_equal(final[name], whole[name])


@pytest.mark.parametrize("restoring", [False, True])
def test_a_swap_that_fails_midway_is_no_error_of_sampling(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, restoring: bool
) -> None:
    runtime, _ = trained(make_job(ema_decay=0.9))
    count, copy = len(runtime.state()["weights"]), torch.Tensor.copy_
    left = 7 + 3 * count * restoring
    copied: list[None] = []

    def failing(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        copied.append(None)
        return no_memory() if len(copied) > left else copy(tensor, other)

    monkeypatch.setattr(torch.Tensor, "copy_", failing)
    with pytest.raises(WeightsLost, match="from the newest"), runtime._update.averaged():
        assert restoring, "weights are mixed"


def no_memory(*_: object, **__: object) -> torch.Tensor:
    raise RuntimeError("out of memory")


def test_sampling_models_leave_the_device_and_are_in_the_compute_dtype(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text encoders leave it before the denoiser draws, and are loaded for the first picture."""
    models, dtypes, draw = list[ReferenceType[Any]](), set[torch.dtype](), Sampler.draw
    load = torch_sampler.load_text_encoder

    def watch(model: Any) -> Any:
        models.append(ref(model))
        dtypes.add(model.dtype)
        return model

    def watched(sampler: Sampler, *given: Any, **more: Any) -> Any:
        watch(sampler._pipe.vae)
        return draw(sampler, *given, **more)

    monkeypatch.setattr(Sampler, "draw", watched)
    monkeypatch.setattr(torch_sampler, "load_text_encoder", lambda *given: watch(load(*given)))
    runtime, _ = start(make_job(mixed_precision="bf16"))
    gc.disable()
    try:
        first = runtime.sample(["a"], SAMPLER)
        assert [model() for model in models] == [None] * 3
        assert (runtime.sample(["a"], SAMPLER) == first).all()
        assert len(models) == 4, "the second VAE"
    finally:
        gc.enable()
    assert dtypes == {torch.bfloat16}


def test_sampling_decodes_with_the_vae_of_the_job(make_job: MakeJob, tiny_vae: Path) -> None:
    sampler = {"seed": 0, "num_inference_steps": 1, "guidance_scale": 1.0, "batch_size": 1}
    own, other = (
        start(replace(make_job(), vae=vae))[0].sample(["a"], sampler)
        for vae in (None, str(tiny_vae))
    )
    assert (own != other).any()


@pytest.fixture
def copied(tiny_sdxl: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_sdxl, tmp_path / "copied"))


@pytest.mark.parametrize(("variant", "dtype"), [("fp16", torch.half), ("bf16", torch.bfloat16)])
def test_weights_stored_in_half_are_trained_in_float32(
    make_job: MakeJob, copied: Path, variant: str, dtype: torch.dtype
) -> None:
    path = copied / "unet/diffusion_pytorch_model.safetensors"
    half = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    path.unlink()
    save_file(half, path.with_name(f"diffusion_pytorch_model.{variant}.safetensors"))
    runtime, _ = start(make_job(model=str(copied)))
    for name, array in runtime.state()["weights"].items():
        stored = half[name.removeprefix("unet.")]
        np.testing.assert_array_equal(array, stored.float().numpy())


@pytest.mark.parametrize("wrong", ["gone", "cut", "lacks", "shape", "extra", "config"])
def test_wrong_weights_are_named(make_job: MakeJob, copied: Path, wrong: str) -> None:
    path = copied / "unet/diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    if wrong == "gone":
        path.unlink()
    elif wrong == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif wrong == "config":
        path = copied / "unet/config.json"
        path.write_text("{")
    else:
        bias = tensors.pop("conv_in.bias")
        if wrong == "shape":
            tensors["conv_in.bias"] = bias[:3]
        if wrong == "extra":
            tensors |= {"conv_in.bias": bias, "lora.weight": bias.clone()}
        save_file(tensors, path)
    with pytest.raises(Refused, match=path.name):
        start(make_job(model=str(copied)))


def test_a_state_of_another_model_is_refused(make_job: MakeJob) -> None:
    runtime, _ = start(make_job())
    state = runtime.state()
    state["exp_avg"].popitem()
    with pytest.raises(Refused, match="exp_avg"):
        runtime.restore(state, 1)


@pytest.mark.parametrize("device", ["cuda:99", "gpu", "mps"])
def test_a_device_that_is_not_there_is_refused(make_job: MakeJob, device: str) -> None:
    job = make_job()
    with pytest.raises(Refused, match="device"):
        start(replace(job, train={**job.train, "device": device}))


@pytest.mark.parametrize(
    "settings", [{"attention": "efficient"}, {"allow_tf32": True}, {"cuda_graphs": True}]
)
def test_a_job_refuses_what_its_device_does_not_support(
    make_job: MakeJob, settings: dict[str, Any]
) -> None:
    """Nobody may have checked it: a job file can be written by hand."""
    with pytest.raises(Refused, match="needs a CUDA device"):
        start(make_job(**settings))


def test_stable_diffusion_trains_without_sizes(
    make_job: MakeJob, tiny_sd: Path, tmp_path: Path, write_latents: Callable[..., str]
) -> None:
    info = {"family": "sd", "prompt_dim": 32, "pooled_dim": None, "empty_prompt": "encoded"}
    url = write_latents(tmp_path / "sd", [{"train/8x8": 6}], **info)
    runtime, batch = start(make_job(model=str(tiny_sd), latents=url))
    given = batch(0)
    unet = UNet2DConditionModel.from_pretrained(tiny_sd, subfolder="unet")
    predicted = unet(
        torch.from_numpy(given.noisy_latents),
        torch.from_numpy(given.timesteps),
        torch.from_numpy(given.conditioning["prompt_embeds"]),
    ).sample
    expected = torch.nn.functional.mse_loss(predicted, torch.from_numpy(given.target)).item()
    losses = [float(runtime.step(given, 1e-3).loss) for _ in range(8)]
    assert_close(losses[0], expected)
    assert losses[-1] < 0.9 * losses[0], losses


def test_a_base_with_dropout_resumes_to_the_bit(make_job: MakeJob, copied: Path) -> None:
    path = copied / "unet/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dropout": 0.3}))
    job = make_job(model=str(copied))
    (plain, _), (dropping, runtime) = run(make_job(), 2), run(job, 2)
    assert dropping != plain
    torch.manual_seed(123)  # what another process would start with
    other, batch = start(job)
    other.restore(runtime.state(), 2)
    assert float(other.step(batch(2), 1e-3).loss) == float(runtime.step(batch(2), 1e-3).loss)
