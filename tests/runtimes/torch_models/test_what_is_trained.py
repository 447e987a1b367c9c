"""Text encoders trained too, training from scratch, and going on from what was published."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, UNet2DConditionModel
from jobs import CPU, MakeJob, predicted, start, trained

from configs.errors import Refused
from runtimes.adapters.lora_files import LORA_WEIGHTS, read_adapters
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import Drawing, TrainJob
from runtimes.torch_models.activation_memory import Inputs, sender
from runtimes.torch_models.network import Network, load_network
from runtimes.train.training_loop import write_result
from tasks.publish.assemble import assemble

pytestmark = pytest.mark.slow


def test_captions_are_encoded_in_the_step_and_dropped_ones_are_zeros(make_job: MakeJob) -> None:
    runtime, batch = start(make_job(train_text_encoder=True, caption_dropout_rate=0.5, seed=2))
    given = Inputs(batch(0), sender(CPU))
    dropped = given.conditioning["dropped"]
    assert set(dropped.tolist()) == {0.0, 1.0}
    network = runtime._network.eval()
    pipe = DiffusionPipeline.from_pretrained(runtime._base.folder)
    outputs = [
        encoder(given.conditioning["input_ids"][:, row].long(), output_hidden_states=True)
        for row, encoder in enumerate((pipe.text_encoder, pipe.text_encoder_2))
    ]
    kept = 1 - dropped[:, None]
    embeds = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1) * kept[..., None]
    with torch.inference_mode():
        expected = pipe.unet(
            given.noisy_latents,
            given.timesteps,
            embeds,
            added_cond_kwargs={
                "text_embeds": outputs[1].text_embeds * kept,
                "time_ids": given.conditioning["add_time_ids"],
            },
        ).sample
        ours = network(given.noisy_latents, given.timesteps, given.conditioning)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_whole_text_encoders_are_written_and_draw(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(train_text_encoder=True)
    runtime, batch = trained(job, rate=1e-2)
    files = [file.path for file in write_result(job, Base.of(job), runtime.state(), [])]
    parts = ("unet", "text_encoder", "text_encoder_2")
    assert {path.partition("/")[0] for path in files if "/" in path} == set(parts)
    folders = {part: Path(job.out) / part for part in parts}
    drawing = Drawing(out="", parts={part: str(folder) for part, folder in folders.items()})
    loaded = load_network(drawing, Base.of(job), torch.float32, CPU)
    expected = predicted(runtime._network, batch)
    torch.testing.assert_close(predicted(loaded, batch), expected, rtol=1e-6, atol=1e-6)
    assemble(Base.of(job), folders, tmp_path / "published", dtype="float32")
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "published")
    whole = Network(loaded.family, {part: getattr(pipe, part) for part in parts})
    torch.testing.assert_close(predicted(whole, batch), expected, rtol=1e-6, atol=1e-6)


def test_stored_text_weights_have_the_names_of_the_hub(make_job: MakeJob) -> None:
    runtime, _ = start(make_job(train_text_encoder=True))
    names = {n for n in runtime.state()["weights"] if n.startswith("text_encoder")}
    assert "text_encoder.text_model.final_layer_norm.weight" in names
    assert "text_encoder_2.text_projection.weight" in names
    assert all(".text_model." in n or ".text_projection." in n for n in names)


def test_from_scratch_the_weights_are_the_seed_s(make_job: MakeJob) -> None:
    def fresh(seed: int) -> dict[str, np.ndarray]:
        torch.manual_seed(seed * 7 + 1)
        return start(make_job(init="random", seed=seed))[0].state()["weights"]

    torch.manual_seed(3)
    before = torch.get_rng_state()
    one = fresh(1)
    torch.set_rng_state(before)
    np.testing.assert_equal(one, fresh(1))
    other, base = fresh(2), start(make_job())[0].state()["weights"]
    assert one.keys() == base.keys()
    name = "unet.conv_in.weight"
    assert (one[name] != other[name]).any() and (one[name] != base[name]).any()


def fresh(job: TrainJob, **changed: object) -> TrainJob:
    """The same job from scratch, with a denoiser of another config."""
    found = json.loads((Path(job.model) / "unet/config.json").read_text())
    config = {**found, **changed}
    return replace(job, train={**job.train, "init": "random"}, denoiser_config=config)


def test_from_scratch_a_denoiser_of_another_size(make_job: MakeJob) -> None:
    job = make_job()
    small_job = fresh(job, block_out_channels=[8, 16], attention_head_dim=[1, 2])
    runtime, batch = trained(small_job, rate=1e-2)
    assert (
        write_result(small_job, Base.of(small_job), runtime.state(), [])[1].path
        == "unet/config.json"
    )
    unet = UNet2DConditionModel.from_pretrained(f"{job.out}/unet")
    assert unet.config.block_out_channels == [8, 16]
    drawing = Drawing(out="", parts={"unet": f"{job.out}/unet"})
    loaded = load_network(drawing, Base.of(job), torch.float32, CPU)
    torch.testing.assert_close(predicted(loaded, batch), predicted(runtime._network, batch))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"cross_attention_dim": 48}, "cross_attention_dim is 48, the base's is 64"),
        ({"addition_embed_type": None}, "addition_embed_type is None, the base's is text_time"),
        ({"block_out_channels": [8]}, "makes no denoiser"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    make_job: MakeJob, changed: dict[str, object], words: str
) -> None:
    with pytest.raises(Refused, match=words):
        start(fresh(make_job(), **changed))


@pytest.mark.parametrize("method", ["full", "lora"])
def test_training_goes_on_from_what_was_published(
    make_job: MakeJob, tmp_path: Path, method: str
) -> None:
    job = make_job(
        method=method, lora={"target_modules": "all", "alpha": 7.0}, train_text_encoder=True
    )
    runtime, batch = trained(job, rate=1e-2)
    write_result(job, Base.of(job), runtime.state(), [])
    out, base = Path(job.out), Path(job.model)
    parts = {} if method == "lora" else {p.name: p for p in out.iterdir() if p.is_dir()}
    adapters = read_adapters(out / LORA_WEIGHTS) if method == "lora" else None
    published = tmp_path / "published"
    assemble(Base.open(base), parts, published, dtype="float32", adapters=adapters)
    again, _ = start(make_job("again", model=str(published), train_text_encoder=True))
    torch.testing.assert_close(
        predicted(again._network, batch), predicted(runtime._network, batch), rtol=1e-5, atol=1e-5
    )
    assert np.isfinite(float(again.step(batch, 1e-3).loss))
