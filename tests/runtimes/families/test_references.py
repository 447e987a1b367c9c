"""Edit models: trained and drawn with reference pictures as diffusers' pipelines read them.

The reference of training is the arithmetic of diffusers' train_dreambooth_lora_flux_kontext.py and
train_dreambooth_lora_flux2_klein_img2img.py at 0.42.1, with the functions of its pipelines.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chips
import numpy as np
import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    FluxKontextPipeline,
    FluxTransformer2DModel,
)
from diffusers_script import (
    Script,
    assert_figures,
    levels,
    prompt_and_pooled_embeds,
    read_pictures,
    start_noise,
)
from flow_families import (
    GUIDANCE,
    SAMPLER,
    SIZE,
    FlowFamily,
    WriteLatents,
    assert_a_run_moves_to_jax_and_back,
    assert_adapters_load,
    job_maker,
)
from jobs import MakeJob
from PIL import Image
from training import losses, train

from runtimes.families import FAMILIES
from runtimes.families.family import calling
from runtimes.process.job import Drawing, Events, GenerateJob, TrainJob
from runtimes.sample.generate_job import generate

pytestmark = pytest.mark.slow
LORA = {
    "method": "lora",
    "learning_rate": 1e-2,
    "lora": {"rank": 4, "alpha": 8.0, "target_modules": ["attn.to_q", "attn.to_v"]},
}


def job_with(
    counts: Sequence[int], make_job: MakeJob, write_latents: WriteLatents, folder: Path
) -> MakeJob:
    """`make(model, **settings)`: a job on pictures that have so many references, by turns."""
    return job_maker(make_job, write_latents, folder, references=counts)


def script_of_flux2(job: TrainJob) -> Script:
    references: list[torch.Tensor] = []
    pipe = Flux2KleinPipeline.from_pretrained(job.model)
    normal = pipe.vae.bn

    def scale(latents: torch.Tensor) -> torch.Tensor:
        patches = pipe._patchify_latents(latents[None])
        std = torch.sqrt(normal.running_var + pipe.vae.config.batch_norm_eps)
        scaled = (patches - normal.running_mean.view(1, -1, 1, 1)) / std.view(1, -1, 1, 1)
        return pipe._unpatchify_latents(scaled)[0]

    def predict(model: Any, noisy: Any, timesteps: Any, prompts: Any) -> torch.Tensor:
        embeds, patches = torch.stack(prompts), pipe._patchify_latents(noisy)
        own = pipe._prepare_latent_ids(patches)
        packed = [pipe._pack_latents(patches)]
        ids = [own]
        given = [pipe._patchify_latents(latents) for latents in references]
        if given:
            packed += [pipe._pack_latents(latents) for latents in given]
            of_one = pipe._prepare_image_ids([latents[:1] for latents in given])
            ids.append(of_one.repeat(len(noisy), 1, 1))
        output = model(
            hidden_states=torch.cat(packed, dim=1),
            timestep=timesteps / 1000,
            guidance=None,
            encoder_hidden_states=embeds,
            txt_ids=pipe._prepare_text_ids(embeds),
            img_ids=torch.cat(ids, dim=1),
            return_dict=False,
        )[0][:, : own.shape[1]]
        return pipe._unpatchify_latents(pipe._unpack_latents_with_ids(output, own))

    model = Flux2Transformer2DModel.from_pretrained(Path(job.model) / "transformer")
    return Script(job, model, predict, scale, draws=False, references=references)


def script_of_kontext(job: TrainJob) -> Script:
    references: list[torch.Tensor] = []
    pipe = FluxKontextPipeline.from_pretrained(job.model)
    vae = pipe.vae.config

    def predict(model: Any, noisy: Any, timesteps: Any, prompts: Any) -> torch.Tensor:
        count, _, height, width = noisy.shape
        prompt, pooled = (torch.stack(part) for part in zip(*prompts, strict=True))

        def ids(latents: torch.Tensor, first: int) -> torch.Tensor:
            size = (side // 2 for side in latents.shape[-2:])
            found = pipe._prepare_latent_image_ids(count, *size, "cpu", torch.float32)
            found[..., 0] = first
            return found

        packed = [pipe._pack_latents(each, *each.shape) for each in (noisy, *references)]
        output = model(
            hidden_states=torch.cat(packed, dim=1),
            timestep=timesteps / 1000,
            guidance=torch.full([count], GUIDANCE),
            pooled_projections=pooled,
            encoder_hidden_states=prompt,
            txt_ids=torch.zeros(prompt.shape[1], 3),
            img_ids=torch.cat([ids(noisy, 0), *(ids(each, 1) for each in references)]),
            return_dict=False,
        )[0][:, : packed[0].shape[1]]
        return pipe._unpack_latents(output, 4 * height, 4 * width, 4)

    def scaled(latents: torch.Tensor) -> torch.Tensor:
        return (latents - vae.shift_factor) * vae.scaling_factor

    model = FluxTransformer2DModel.from_pretrained(Path(job.model) / "transformer")
    return Script(job, model, predict, scaled, prompt_and_pooled_embeds, references=references)


SCRIPTS = {"flux2": script_of_flux2, "flux_kontext": script_of_kontext}
CHANNELS = {"flux2": 4, "flux_kontext": 8}


@pytest.fixture
def model(request: pytest.FixtureRequest, family: str) -> Path:
    folder: Path = request.getfixturevalue(f"tiny_{family}")
    return folder


@pytest.mark.parametrize(
    ("family", "counts", "method"),
    [
        ("flux2", (0, 1, 3), "full"),
        ("flux2", (1,), "lora"),
        pytest.param("flux2", (3,), "lora", marks=pytest.mark.extended),
        ("flux_kontext", (0, 1), "full"),
        pytest.param("flux_kontext", (1,), "lora", marks=pytest.mark.extended),
    ],
    ids=lambda value: value if isinstance(value, str) else "".join(map(str, value)),
)
def test_twenty_steps_have_the_figures_of_diffusers_script(
    family: str,
    counts: tuple[int, ...],
    method: str,
    model: Path,
    make_job: MakeJob,
    write_latents: WriteLatents,
    tmp_path: Path,
) -> None:
    edit_job = job_with(counts, make_job, write_latents, tmp_path)
    job = edit_job(model, guidance_scale=GUIDANCE, **(LORA if method == "lora" else {}))
    script = SCRIPTS[family](job)
    if method == "lora":
        script.add_adapters(4, 8.0, LORA["lora"]["target_modules"])
    assert_figures(job, script)


@pytest.mark.extended
@pytest.mark.parametrize(("family", "counts"), [("flux2", (0, 3)), ("flux_kontext", (0, 1))])
def test_jax_trains_as_torch_does(
    family: str,
    counts: tuple[int, ...],
    model: Path,
    make_job: MakeJob,
    write_latents: WriteLatents,
    tmp_path: Path,
) -> None:
    edit_job = job_with(counts, make_job, write_latents, tmp_path)
    given = {"guidance_scale": GUIDANCE, "reference_dropout_rate": 0.3}
    assert_a_run_moves_to_jax_and_back(edit_job, model, **given)


PROMPTS = ("a red cat", "two dogs")


@pytest.fixture
def files(tmp_path: Path) -> list[list[str]]:
    """Three references for each of two prompts, of three sizes of which klein refuses none."""
    rng = np.random.default_rng(4)
    rows = []
    for prompt in range(2):
        paths = []
        for number, size in enumerate(((64, 96), (64, 64), (80, 64))):
            colours = rng.integers(256, size=(4, 4, 3)).astype(np.uint8)
            path = tmp_path / f"{prompt}-{number}.png"
            Image.fromarray(colours).resize(size[::-1], Image.Resampling.NEAREST).save(path)
            paths.append(str(path))
        rows.append(paths)
    return rows


#: Ends of the names of weights by which pictures depend on the values that attention reads.
VALUES = tuple(
    f"{layer}.weight" for layer in ("x_embedder", "to_v", "to_out.0", "to_out", "to_qkv_mlp_proj")
)


@pytest.fixture
def attentive(model: Path, tmp_path: Path) -> Path:
    """The model, whose pictures depend on references by more than a few levels."""
    pipe = DiffusionPipeline.from_pretrained(model)
    with torch.no_grad():
        for name, weight in pipe.transformer.named_parameters():
            if name.endswith(VALUES):
                weight *= 4
    pipe.save_pretrained(tmp_path / "attentive")
    return tmp_path / "attentive"


def drawn(runtime: str, model: Path, out: Path, references: list[list[str]], **changes: Any) -> Any:
    """Levels [N, H, W, 3] of a job's pictures."""
    sampler = SAMPLER | changes.pop("sampler", {})
    job = GenerateJob(
        *(runtime, str(model), (Drawing(str(out)),), PROMPTS, sampler, "cpu"),
        references=tuple(map(tuple, references)),
        **{"reference_step": 16, **changes},
    )
    generate(job, Events())
    return read_pictures(out)


def of_pipeline(family: str, model: Path, references: list[list[str]]) -> Any:
    """The same of diffusers, which has one set of references for all pictures of a call."""
    kind = {"flux2": Flux2KleinPipeline, "flux_kontext": FluxKontextPipeline}[family]
    pipe = kind.from_pretrained(model)
    pipe.set_progress_bar_config(disable=True)
    noise = start_noise(2, (CHANNELS[family], 8, 12), 7)
    found = []
    for row, prompt in enumerate(PROMPTS):
        images = [Image.open(path) for path in (references[row] if references else [])]
        given = {"prompt": [prompt], "num_inference_steps": 3, "guidance_scale": GUIDANCE, **SIZE}
        own = noise[row : row + 1]
        if family == "flux2":
            latents, given["max_sequence_length"] = pipe._patchify_latents(own), 40
            given["image"] = images or None
        else:
            latents, given["max_sequence_length"] = pipe._pack_latents(own, *own.shape), 20
            given["image"] = images[0] if images else None
            given |= {"max_area": SIZE["height"] * SIZE["width"], "_auto_resize": False}
        found += pipe(latents=latents, **given).images
    return levels(found)


@pytest.mark.parametrize(
    ("family", "count"),
    [("flux2", 0), ("flux2", 1), ("flux2", 3), ("flux_kontext", 0), ("flux_kontext", 1)],
)
def test_pictures_are_those_of_the_pipeline(
    family: str, count: int, attentive: Path, files: list[list[str]], tmp_path: Path
) -> None:
    model = attentive
    chips.require("jax")
    references = [row[:count] for row in files]
    expected = of_pipeline(family, model, references)
    for runtime in ("torch", "jax"):
        found = drawn(runtime, model, tmp_path / runtime, references)
        assert np.abs(found - expected).max() <= 1, runtime
    if count:
        plain, exchanged = (of_pipeline(family, model, each) for each in ([], references[::-1]))
        assert np.abs(plain - expected).max() > 20, "by references"
        assert np.abs(exchanged - expected).max() > 1, "by other ones"


@pytest.mark.parametrize("family", ["flux2"])
def test_batches_of_other_shapes_and_offloaded_layers_draw_the_same(
    attentive: Path, files: list[list[str]], tmp_path: Path
) -> None:
    """The two prompts have references of other numbers, so each is a batch."""
    references = [files[0][:1], files[1]]
    one = {"sampler": {"batch_size": 1}}
    expected = drawn("torch", attentive, tmp_path / "one", references, **one)
    assert np.array_equal(drawn("torch", attentive, tmp_path / "two", references), expected)
    offloaded = drawn("torch", attentive, tmp_path / "offloaded", references, offload=True)
    assert np.array_equal(offloaded, expected)


@pytest.mark.extended
@pytest.mark.parametrize("family", ["flux2"])
def test_an_8_bit_base_and_streamed_blocks_train_with_references(
    model: Path, make_job: MakeJob, write_latents: WriteLatents, tmp_path: Path
) -> None:
    edit_job = job_with((3,), make_job, write_latents, tmp_path)
    given = {**LORA, "gradient_checkpointing": "blocks"}
    plain = edit_job(model, "plain", **given)
    small = {"lora": {**LORA["lora"], "base_precision": "int8"}, "stream_blocks": 3}
    saving = edit_job(model, "saving", **{**given, **small})
    assert train(plain) == train(saving) == 0
    assert losses(saving) == pytest.approx(losses(plain), rel=0.05)


def test_a_module_s_hooked_forward_is_there_after_a_call_of_another() -> None:
    """diffusers' hooks of offloaded layers replace `forward`: without them, no layer moves."""
    module = torch.nn.Linear(2, 2)
    hooked = module.forward = lambda *_: "hooked"  # type: ignore[method-assign]
    with calling(module, lambda *_: "ours"):
        assert module(None) == "ours"
    assert module.forward is hooked
    assert "forward" in vars(module)


@pytest.mark.parametrize("family", ["flux_kontext"])
def test_adapters_of_kontext_load_in_both_layouts_and_name_its_trainer(
    model: Path, make_job: MakeJob, write_latents: WriteLatents, tmp_path: Path
) -> None:
    edit_job = job_with((1,), make_job, write_latents, tmp_path)
    # diffusers reads single blocks in kohya's layout in the published sizes alone.
    layers = ["transformer_blocks.0.attn.to_q", "transformer_blocks.0.ff.net.0.proj"]
    adapters = {"rank": 3, "alpha": 5.0, "target_modules": layers}
    job = edit_job(model, method="lora", lora=adapters, learning_rate=1e-2)
    edits = FlowFamily("flux_kontext", FluxKontextPipeline, PROMPTS, of_pipeline)
    assert_adapters_load(edits, job, tmp_path, kohya=True, count=2)
    kohya = FAMILIES["flux_kontext"].kohya
    assert kohya is not None and kohya.base({}, "").version == "flux_kontext"  # musubi-tuner's
