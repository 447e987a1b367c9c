"""FLUX.1 dev and schnell: encoded, trained, drawn and stored as diffusers does it.

The reference of training is the arithmetic of diffusers' scripts train_dreambooth_flux.py and
train_dreambooth_lora_flux.py, written with the functions of diffusers that they call.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import chips
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from diffusers.training_utils import compute_loss_weighting_for_sd3
from jobs import HOLDOUT, MakeJob, predicted, trained
from PIL import Image
from safetensors.torch import save_file
from training import history, roll_back, train, weights

from artifacts.latent_shards import LatentShard, from_bfloat16, open_latents
from configs.train import Train
from runtimes.adapters.kohya_format import to_kohya
from runtimes.adapters.lora_file_format import LORA_WEIGHTS, read_adapters
from runtimes.adapters.lora_layers import initial_down
from runtimes.data.bucketed_sample_order import Order
from runtimes.families import FAMILIES
from runtimes.objective.counter_based_random import Stream, generator
from runtimes.pipeline_folder.describe_encoders import (
    describe_encoders,
    digest_encoders,
    text_length,
    unusual_text_length,
)
from runtimes.process.events import Events
from runtimes.process.job import Drawing, GenerateJob, TrainJob
from runtimes.sample.generate_job import generate
from runtimes.torch_models.encode_images_and_captions import Encoder
from runtimes.torch_models.network import Network
from runtimes.train.write_result import write_result
from tasks.publish.assemble_pipeline import assemble

pytestmark = pytest.mark.slow
PROMPTS = ("a red cat", "two dogs")
STEPS, BATCH, GUIDANCE = 20, 4, 3.5
#: Relative; the script sums a batch at once, the runtime sample by sample.
SCRIPT = 1e-5
#: The layers that train_dreambooth_lora_flux.py adapts without --lora_layers.
SCRIPT_TARGETS = [
    *("attn.to_k", "attn.to_q", "attn.to_v", "attn.to_out.0"),
    *("attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out"),
    *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
]
SIZE = {"height": 32, "width": 48}
SAMPLER = {"seed": 7, "num_inference_steps": 3, "guidance_scale": GUIDANCE, "batch_size": 2} | SIZE


@pytest.fixture(params=["dev", "schnell"])
def model(request: pytest.FixtureRequest, tiny_flux: Path, tiny_flux_schnell: Path) -> Path:
    return tiny_flux if request.param == "dev" else tiny_flux_schnell


@pytest.fixture
def flux_job(make_job: MakeJob, write_latents: Callable[..., str], tmp_path: Path) -> MakeJob:
    """`flux_job(model, **settings)`: a job on pictures of two shapes."""
    groups = {"train/8x8": 23, "train/4x12": 9, "holdout/8x8": 3}

    def make(model: Path, name: str = "run", **settings: Any) -> TrainJob:
        info = describe_encoders(model)
        latents = write_latents(str(tmp_path / "store"), [groups], **info)
        given = {"steps": STEPS, "max_grad_norm": 1.0, **settings}
        return make_job(name=name, model=str(model), latents=latents, **given)

    return make


class Script:
    """diffusers' script on the samples, noise and timesteps of a job."""

    def __init__(self, job: TrainJob) -> None:
        self.settings, folder = Train(**job.train), Path(job.model)
        self.model = FluxTransformer2DModel.from_pretrained(folder / "transformer").train()
        self.scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler")
        self.vae = FluxPipeline.from_pretrained(folder).vae.config
        refs = open_latents(job.latents).shards
        self.order = Order([ref.groups for ref in refs], batch_size=BATCH, seed=0, window=4)
        self.shards = [LatentShard(ref.url) for ref in refs]

    def add_adapters(self, rank: int, alpha: float) -> None:
        from peft import LoraConfig

        self.model.requires_grad_(False)
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=SCRIPT_TARGETS)
        self.model.add_adapter(config)
        for name, parameter in self.model.named_parameters():
            if ".lora_A." in name:  # the start that Kilnworks draws
                layer = f"transformer.{name.removesuffix('.lora_A.default.weight')}"
                parameter.data = torch.from_numpy(initial_down(0, layer, parameter.shape))

    def train(self) -> tuple[list[float], list[float]]:
        """Losses and gradient norms of all steps."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        lr, decay = self.settings.learning_rate, self.settings.weight_decay
        optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=decay, foreach=False)
        losses, norms = [], []
        for step in range(STEPS):
            loss = self._loss(step)
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, norms

    def _loss(self, step: int) -> torch.Tensor:
        z, noise, levels, prompt, pooled = self._injected(step)
        timesteps = self.scheduler.timesteps[levels]
        at = [(self.scheduler.timesteps == t).nonzero().item() for t in timesteps]
        sigmas = self.scheduler.sigmas[at].view(-1, 1, 1, 1)
        if self.settings.timesteps.resolution_shift:  # not in the script: as the pipeline samples
            config = self.scheduler.config
            mu = calculate_shift(z.shape[2] * z.shape[3] // 4, config)
            sigmas = self.scheduler.time_shift(mu, 1.0, sigmas)
            timesteps = sigmas.flatten() * 1000
        noisy = (1.0 - sigmas) * z + sigmas * noise
        height, width = z.shape[2:]
        ids = FluxPipeline._prepare_latent_image_ids(
            len(z), height // 2, width // 2, "cpu", torch.float32
        )
        scale = self.settings.guidance_scale
        guided = self.model.config.guidance_embeds
        output = self.model(
            hidden_states=FluxPipeline._pack_latents(noisy, *z.shape),
            timestep=timesteps / 1000,
            guidance=torch.full([len(z)], scale) if guided else None,
            pooled_projections=pooled,
            encoder_hidden_states=prompt,
            txt_ids=torch.zeros(prompt.shape[1], 3),
            img_ids=ids,
            return_dict=False,
        )[0]
        output = FluxPipeline._unpack_latents(output, 4 * height, 4 * width, 4)
        weighting = compute_loss_weighting_for_sd3(self.settings.weighting_scheme, sigmas)
        target = noise - z
        errors = weighting.float() * (output.float() - target.float()) ** 2
        return errors.reshape(len(z), -1).mean(1).mean()

    def _injected(self, step: int) -> tuple[torch.Tensor, torch.Tensor, list[int], Any, Any]:
        """Latents, noise, indices into the scheduler's timesteps, and embeddings of a batch."""
        rows: list[Any] = []
        for row, place in enumerate(self.order.batch(step)):
            counter, shard = step * BATCH + row, self.shards[place.shard]
            sample = shard.sample(place.group, place.row)
            u, caption = generator(0, Stream.CHOICES, counter).random(4)[:2]
            eps, noise = (
                generator(0, stream, counter).standard_normal(sample.mean.shape, np.float32)
                for stream in (Stream.POSTERIOR, Stream.NOISE)
            )
            mean, logvar = from_bfloat16(sample.mean), from_bfloat16(sample.logvar)
            z = (mean + np.exp(logvar / 2) * eps - self.vae.shift_factor) * self.vae.scaling_factor
            text = sample.caption_rows[int(caption * len(sample.caption_rows))]
            pooled = shard.pooled_prompt_embeds(text)
            assert pooled is not None
            embeds = from_bfloat16(shard.prompt_embeds(text)), from_bfloat16(pooled)
            rows.append((z, noise, 999 - int(u * 1000), *embeds))
        z, noise, levels, prompt, pooled = zip(*rows, strict=True)
        stacked = [torch.from_numpy(np.stack(part)) for part in (z, noise, prompt, pooled)]
        return stacked[0], stacked[1], list(levels), stacked[2], stacked[3]


def calculate_shift(tokens: int, config: Any) -> float:
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift as theirs

    found: float = theirs(
        tokens,
        config.base_image_seq_len,
        config.max_image_seq_len,
        config.base_shift,
        config.max_shift,
    )
    return found


LORA = {"method": "lora", "lora": {"rank": 4, "alpha": 8.0, "target_modules": SCRIPT_TARGETS}}
CASES: dict[str, dict[str, Any]] = {
    "full": {"guidance_scale": GUIDANCE},
    "weighted": {"guidance_scale": 1.0, "weighting_scheme": "cosmap"},
    "shifted": {"guidance_scale": GUIDANCE, "timesteps": {"resolution_shift": True}},
    "accumulated": {"guidance_scale": GUIDANCE, "micro_batch_size": 1},
    "lora": {"guidance_scale": GUIDANCE, "learning_rate": 1e-2, **LORA},
}
#: Cases of `make soak` alone: FLUX.2 proves `weighted`, Z-Image and Qwen-Image `accumulated`.
IN_SOAK = ("weighted", "accumulated")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.soak] * (case in IN_SOAK)) for case in CASES]
)
def test_twenty_steps_have_the_figures_of_diffusers_script(
    flux_job: MakeJob, tiny_flux: Path, case: str
) -> None:
    assert_as_script(flux_job(tiny_flux, **CASES[case]))


def test_schnell_has_the_figures_of_diffusers_script(
    flux_job: MakeJob, tiny_flux_schnell: Path
) -> None:
    assert_as_script(flux_job(tiny_flux_schnell))


def assert_as_script(job: TrainJob) -> None:
    assert train(job) == 0
    script = Script(job)
    if job.train["method"] == "lora":
        script.add_adapters(4, 8.0)
    losses, norms = script.train()
    assert [line["loss"] for line in history(job)] == pytest.approx(losses, rel=SCRIPT)
    assert [line["grad_norm"] for line in history(job)] == pytest.approx(norms, rel=SCRIPT)


def test_embeddings_are_those_of_encode_prompt_and_latents_of_its_vae(model: Path) -> None:
    encoder, pipe = Encoder(model, device="cpu"), FluxPipeline.from_pretrained(model)
    ours, pooled = encoder.texts(PROMPTS)
    length = text_length(model)
    with torch.no_grad():  # as the pipeline calls it
        theirs, their_pooled, _ = pipe.encode_prompt(
            list(PROMPTS), None, max_sequence_length=length
        )
    assert ours.shape == (2, length, 80)
    assert torch.equal(torch.from_numpy(ours), theirs)
    assert torch.equal(torch.from_numpy(pooled), their_pooled)
    pixels = np.random.default_rng(0).uniform(-1, 1, (2, 3, 32, 48)).astype(np.float32)
    mean, logvar = encoder.images(pixels)
    with torch.no_grad():
        posterior = pipe.vae.encode(torch.from_numpy(pixels)).latent_dist
    assert torch.equal(torch.from_numpy(mean), posterior.mean)
    assert torch.equal(torch.from_numpy(logvar), posterior.logvar)


def test_dev_has_512_rows_of_t5_and_schnell_256(model: Path, tmp_path: Path) -> None:
    """The authors' limits, since the published tokenizers have 512; the tests' has fewer."""
    copy = tmp_path / "copy"
    assemble(model, {}, copy, dtype="float32")
    path = copy / "tokenizer_2/tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": 512}))
    guided = json.loads((copy / "transformer/config.json").read_text())["guidance_embeds"]
    assert text_length(copy) == (512 if guided else 256) == describe_encoders(copy)["tokens"]
    assert unusual_text_length(copy) == (None if guided else 256)
    assert unusual_text_length(model) == text_length(model) == 20, "the tokenizer's own limit"
    digest = digest_encoders(copy)
    other = copy / "transformer/config.json"
    other.write_text(json.dumps(json.loads(other.read_text()) | {"guidance_embeds": not guided}))
    assert digest_encoders(copy) != digest, "dev and schnell have the same encoders"


def pictures(runtime: str, drawing: Drawing, folder: Path, **sampler: Any) -> Any:
    job = GenerateJob(runtime, str(folder), (drawing,), PROMPTS, SAMPLER | sampler, "cpu")
    generate(job, Events())
    return read_pictures(Path(drawing.out))


def read_pictures(folder: Path) -> Any:
    paths = sorted(folder.glob("*.png"))
    return np.stack([np.asarray(Image.open(path)).astype(int) for path in paths])


def of_diffusers(pipe: FluxPipeline, prompts: tuple[str, ...], **changes: Any) -> Any:
    rngs = [generator(7, Stream.PICTURE, number) for number in range(len(prompts))]
    noise = np.stack([rng.standard_normal((8, 8, 12), dtype=np.float32) for rng in rngs])
    pipe.set_progress_bar_config(disable=True)
    given = {"num_inference_steps": 3, "guidance_scale": GUIDANCE, **SIZE, **changes}
    drawn = pipe(
        list(prompts),
        latents=pipe._pack_latents(torch.from_numpy(noise), *noise.shape),
        max_sequence_length=20,
        **given,
    ).images
    return np.stack([np.asarray(picture).astype(int) for picture in drawn])


def test_pictures_are_those_of_diffusers(model: Path, tmp_path: Path) -> None:
    """PyTorch's to the bit, jax's within a level, by the guidance and shift of the pipeline."""
    chips.require("jax")
    pipe = FluxPipeline.from_pretrained(model)
    expected = of_diffusers(pipe, PROMPTS)
    assert np.array_equal(pictures("torch", Drawing(str(tmp_path / "torch")), model), expected)
    of_jax = pictures("jax", Drawing(str(tmp_path / "jax")), model)
    assert np.abs(of_jax - expected).max() <= 1
    assert np.abs(of_diffusers(pipe, PROMPTS[::-1]) - expected).max() > 5, "by other prompts"
    other = of_diffusers(pipe, PROMPTS, guidance_scale=1.0)
    dev = pipe.transformer.config.guidance_embeds
    assert bool(np.abs(other - expected).max() > 1) == dev, "by other guidance"


@pytest.mark.parametrize("negative", [None, "fog"])
def test_classifier_free_guidance_is_that_of_diffusers(
    model: Path, tmp_path: Path, negative: str | None
) -> None:
    """The pipeline's true_cfg_scale; without a negative prompt, against the empty one."""
    chips.require("jax")
    pipe = FluxPipeline.from_pretrained(model)
    asked = {"true_cfg_scale": 3.0, "negative_prompt": [negative or ""] * len(PROMPTS)}
    expected = of_diffusers(pipe, PROMPTS, **asked)
    assert np.abs(of_diffusers(pipe, PROMPTS) - expected).max() > 5, "it has an effect"
    given = {"true_cfg_scale": 3.0, "negative_prompt": negative}
    of_torch = pictures("torch", Drawing(str(tmp_path / "torch")), model, **given)
    assert np.array_equal(of_torch, expected)
    of_jax = pictures("jax", Drawing(str(tmp_path / "jax")), model, **given)
    assert np.abs(of_jax - expected).max() <= 1


@pytest.mark.soak
@pytest.mark.parametrize("method", ["full", "text"])
def test_jax_trains_as_torch_does_and_a_run_moves_there_and_back(
    flux_job: MakeJob, tiny_flux: Path, tmp_path: Path, method: str
) -> None:
    chips.require("jax")
    more = {"train_text_encoder": True} if method == "text" else {"ema_decay": 0.9}
    settings = {"steps": 6, "checkpointing_steps": 2, "checkpoints_total_limit": 9, **more}
    settings |= {"caption_dropout_rate": 0.3}
    whole = flux_job(tiny_flux, "whole", guidance_scale=GUIDANCE, **settings)
    assert train(whole) == 0
    moved = flux_job(tiny_flux, "moved", guidance_scale=GUIDANCE, **settings)
    for runtime, first, left in (("torch", 0, 2), ("jax", 2, 4), ("torch", 4, None)):
        assert train(replace(moved, runtime=runtime)) == first
        if left is not None:
            roll_back(moved, left)
    for name, wanted in (("loss", 1e-4), ("grad_norm", 1e-3)):
        found, expected = ([line[name] for line in history(job)] for job in (moved, whole))
        assert found == pytest.approx(expected, rel=wanted)
    roll_back(whole, 4)
    before = weights(moved)
    assert train(whole) == 4
    assert weights(whole).keys() == before.keys()


def test_a_trained_transformer_is_drawn_measured_and_published(
    flux_job: MakeJob, tiny_flux: Path, tmp_path: Path
) -> None:
    job = flux_job(tiny_flux, guidance_scale=GUIDANCE)
    train(job)
    parts = {"transformer": f"{job.out}/transformer"}
    drawings = (Drawing(str(tmp_path / "base")), Drawing(str(tmp_path / "tuned"), parts))
    found = {}
    for scale in (GUIDANCE, 1.0):
        asked = {**HOLDOUT, "levels": 4, "guidance_scale": scale}
        drawn = GenerateJob(
            *("torch", str(tiny_flux), drawings, PROMPTS, SAMPLER),
            *("cpu", "float32", job.latents, asked),
        )
        generate(drawn, Events())
        paths = [Path(drawing.out, "losses.json") for drawing in drawings]
        found[scale] = np.array([json.loads(path.read_text())["losses"] for path in paths])
        for path in paths:
            path.unlink()
    assert found[GUIDANCE].shape == (2, 3, 4), "model, sample, noise level"
    assert found[GUIDANCE][1].mean() < found[GUIDANCE][0].mean()
    assert not np.array_equal(found[1.0], found[GUIDANCE])

    replaced = {"transformer": Path(parts["transformer"])}
    assemble(tiny_flux, replaced, tmp_path / "p", dtype="float32")
    expected = of_diffusers(FluxPipeline.from_pretrained(tmp_path / "p"), PROMPTS)
    assert np.array_equal(read_pictures(Path(drawings[1].out)), expected)


TARGETS: dict[str, Any] = {
    "attention": "attention",
    "blocks": [*SCRIPT_TARGETS, "proj_mlp", "norm.linear"],
    # diffusers reads single blocks in kohya's layout in the published sizes alone.
    "double": [f"transformer_blocks.0.{name}" for name in (*SCRIPT_TARGETS, "norm1.linear")],
}


@pytest.mark.parametrize(
    ("targets", "dora"),
    [("attention", False), ("blocks", True), ("double", False)],
)
def test_adapters_load_in_diffusers_in_both_layouts(
    flux_job: MakeJob, tiny_flux: Path, tmp_path: Path, targets: str, dora: bool
) -> None:
    adapters = {"rank": 3, "alpha": 5.0, "target_modules": TARGETS[targets], "dora": dora}
    text = targets == "double"
    given = {"method": "lora", "lora": adapters, "train_text_encoder": text}
    job = flux_job(tiny_flux, **given, learning_rate=1e-2)
    runtime, batch = trained(job)
    write_result(job, runtime.state(), [])
    expected = predicted(runtime._network, batch)
    files = {LORA_WEIGHTS: Path(job.out)}
    if targets == "double":
        save_file(as_kohya(job), tmp_path / "kohya.safetensors")
        files["kohya.safetensors"] = tmp_path
    for name, folder in files.items():
        pipe = FluxPipeline.from_pretrained(job.model)
        base = in_pipeline(pipe, batch)
        assert (expected - base).abs().max() > 1e-2
        pipe.load_lora_weights(folder, weight_name=name)
        torch.testing.assert_close(in_pipeline(pipe, batch), expected, rtol=1e-4, atol=1e-5)


def in_pipeline(pipe: FluxPipeline, batch: Any) -> torch.Tensor:
    parts = {"transformer": pipe.transformer}
    if "input_ids" in batch.conditioning:
        parts["text_encoder"] = pipe.text_encoder
    return predicted(Network(FAMILIES["flux"], parts), batch)


def as_kohya(job: TrainJob) -> dict[str, torch.Tensor]:
    config = json.loads((Path(job.model) / "transformer/config.json").read_text())
    names = FAMILIES["flux"].kohya
    assert names is not None
    arrays = to_kohya(read_adapters(Path(job.out) / LORA_WEIGHTS), names, config)
    return {name: torch.as_tensor(a) for name, a in arrays.items()}


def test_kohya_s_names_and_products_are_those_of_the_original_code(
    flux_job: MakeJob, tiny_flux: Path
) -> None:
    adapters = {"rank": 3, "alpha": 5.0, "target_modules": ["to_q", "to_v", "proj_mlp"]}
    job = flux_job(tiny_flux, method="lora", lora=adapters, learning_rate=1e-2)
    runtime, _ = trained(job)
    write_result(job, runtime.state(), [])
    found = {name: tuple(array.shape) for name, array in as_kohya(job).items()}
    width, mlp = 32, 128
    assert found == {
        "lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight": (6, width),
        "lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight": (3 * width, 6),
        "lora_unet_double_blocks_0_img_attn_qkv.alpha": (),
        **{
            f"lora_unet_single_blocks_{block}_linear1.{name}": shape
            for block in (0, 1)
            for name, shape in {
                "lora_down.weight": (9, width),
                "lora_up.weight": (3 * width + mlp, 9),
                "alpha": (),
            }.items()
        },
    }
    ours = read_adapters(Path(job.out) / LORA_WEIGHTS)["transformer"]
    arrays = as_kohya(job)
    key = "lora_unet_single_blocks_1_linear1"
    up, down = arrays[f"{key}.lora_up.weight"], arrays[f"{key}.lora_down.weight"]
    fused = arrays[f"{key}.alpha"] / len(down) * up @ down
    block = "single_transformer_blocks.1"
    for layer, first in (("attn.to_q", 0), ("attn.to_v", 2 * width), ("proj_mlp", 3 * width)):
        adapter = ours[f"{block}.{layer}"]
        product = torch.from_numpy(adapter.scale * adapter.up @ adapter.down)
        part = fused[first : first + len(product)]
        torch.testing.assert_close(part, product.float(), atol=1e-6, rtol=1e-5)
    assert not fused[width : 2 * width].any(), "the key has no adapter"
