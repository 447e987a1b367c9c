"""What adapters are written as: ours and diffusers draw the same with it, and so does kohya's."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.loaders.lora_conversion_utils import (
    _convert_non_diffusers_lora_to_diffusers,
    _maybe_map_sgm_blocks_to_diffusers,
)
from diffusers.utils.state_dict_utils import convert_unet_state_dict_to_peft
from jobs import ADAPTERS, CPU, HOLDOUT, SAMPLER, MakeJob, lora, predicted, trained
from safetensors.torch import load_file, save_file

from configs.errors import Refused
from configs.settings.train import Train
from configs.settings.train_parts import Lora
from runtimes.adapters.lora_files import LORA_WEIGHTS, metadata, read_adapters, to_kohya
from runtimes.contract import StepBatch
from runtimes.objective.random_draws import Stream, generator
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import Drawing, Events, GenerateJob, TrainJob
from runtimes.sample.generate_job import generate
from runtimes.torch_models.network import Network, load_network
from runtimes.train.training_loop import write_result

pytestmark = pytest.mark.slow


def in_pipeline(job: TrainJob, pipe: Any, batch: StepBatch) -> torch.Tensor:
    """What the parts of a diffusers pipeline predict."""
    plain = replace(job, train=Train().model_dump(mode="json"))
    network = Network.load(plain, Base.of(job), Train())
    parts = {network.family.denoiser: getattr(pipe, network.family.denoiser)}
    if "input_ids" in batch.conditioning:
        parts |= {name: getattr(pipe, name) for name in network.family.clip_encoders}
    return predicted(Network(network.family, parts), batch)


CASES = {
    "plain": lora(),
    "dora": lora(dora=True),
    "attention": lora(target_modules="attention", alpha=None),
    "texts": {**lora(), "train_text_encoder": True},
    "texts, dora": {**lora(dora=True), "train_text_encoder": True},
    "sd3": lora(target_modules="attention"),
    "sd3, texts": {**lora(), "train_text_encoder": True},
}
EXTENDED = ("plain", "dora", "texts")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.extended] * (case in EXTENDED)) for case in CASES],
)
def test_diffusers_loads_what_was_trained(
    make_job: MakeJob, tiny_sd3: Path, write_latents: Callable[..., str], tmp_path: Path, case: str
) -> None:
    given = CASES[case]
    if case.startswith("sd3"):
        url = write_latents(tmp_path / "sd3", [{"train/8x8": 20}], **Base.open(tiny_sd3).encoders)
        given = {**given, "model": str(tiny_sd3), "latents": url}
    job = make_job(**given)
    runtime, batch = trained(job)
    files = write_result(job, Base.of(job), runtime.state(), [])
    assert [file.path for file in files] == ["history.jsonl", LORA_WEIGHTS]
    pipe = DiffusionPipeline.from_pretrained(job.model)
    base = in_pipeline(job, pipe, batch)
    pipe.load_lora_weights(job.out)
    expected = predicted(runtime._network, batch)
    assert (expected - base).abs().max() > 1e-2
    torch.testing.assert_close(in_pipeline(job, pipe, batch), expected, rtol=1e-5, atol=1e-5)
    drawing = Drawing(out="", lora=f"{job.out}/{LORA_WEIGHTS}")
    merged = load_network(drawing, Base.of(job), torch.float32, CPU)
    assert bool(merged.text_encoders) == ("text" in case)
    torch.testing.assert_close(predicted(merged, batch), expected, rtol=1e-5, atol=1e-5)
    if case.startswith("sd3"):
        adapted = read_adapters(Path(f"{job.out}/{LORA_WEIGHTS}"))["transformer"]
        assert sum(name.endswith("add_q_proj") for name in adapted) == 2, "text's attention too"


def test_the_older_family_s_load_too(
    make_job: MakeJob, tiny_sd: Path, write_latents: Callable[..., str], tmp_path: Path
) -> None:
    info = {"family": "sd", "prompt_dim": 32, "pooled_dim": None, "empty_prompt": "encoded"}
    url = write_latents(tmp_path / "sd", [{"train/8x8": 12}], **info)
    job = make_job(model=str(tiny_sd), latents=url, train_text_encoder=True, **lora())
    check_both_layouts(job, tmp_path)


@pytest.mark.parametrize("targets", ["attention", "all"])
def test_kohya_s_layout_loads_alike(make_job: MakeJob, tmp_path: Path, targets: str) -> None:
    check_both_layouts(make_job(**lora(target_modules=targets), train_text_encoder=True), tmp_path)


def check_both_layouts(job: TrainJob, folder: Path) -> None:
    runtime, batch = trained(job)
    write_result(job, Base.of(job), runtime.state(), [])
    kohya = as_kohya(job)
    assert all(".alpha" in n or ".lora_up." in n or ".lora_down." in n for n in kohya)
    save_file(kohya, folder / "kohya.safetensors")
    expected = predicted(runtime._network, batch)
    for where in ({"weight_name": LORA_WEIGHTS}, {"weight_name": "kohya.safetensors"}):
        pipe = DiffusionPipeline.from_pretrained(job.model)
        root = job.out if where["weight_name"] == LORA_WEIGHTS else folder
        pipe.load_lora_weights(root, **where)
        torch.testing.assert_close(in_pipeline(job, pipe, batch), expected, rtol=1e-5, atol=1e-5)


def as_kohya(job: TrainJob) -> dict[str, torch.Tensor]:
    unet = json.loads((Path(job.model) / "unet/config.json").read_text())
    names = Base.of(job).family.kohya
    assert names is not None
    arrays = to_kohya(read_adapters(Path(job.out) / LORA_WEIGHTS), names, unet)
    return {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items()}


def test_kohya_s_names_of_dora_are_those_that_diffusers_knows(make_job: MakeJob) -> None:
    """Its pipelines leave dora_scale out with a warning; its converter knows where it belongs."""
    job = make_job(**lora(dora=True, target_modules=("to_q", "to_out.0")))
    runtime, _ = trained(job)
    write_result(job, Base.of(job), runtime.state(), [])
    kohya = as_kohya(job)
    scales = [t for n, t in kohya.items() if n.endswith("dora_scale")]
    assert all(scale.shape == (len(scale), 1) for scale in scales), "a length for each output"
    config = runtime._network.denoiser.config
    found, _ = _convert_non_diffusers_lora_to_diffusers(
        _maybe_map_sgm_blocks_to_diffusers(kohya, config)
    )
    ours = load_file(Path(job.out) / LORA_WEIGHTS)
    names = {
        n.removesuffix(".weight"): t for n, t in convert_unet_state_dict_to_peft(found).items()
    }
    assert names.keys() == {name.removesuffix(".weight") for name in ours}
    for name, tensor in ours.items():
        torch.testing.assert_close(names[name.removesuffix(".weight")].view(tensor.shape), tensor)


def test_a_pipeline_with_the_file_draws_what_ours_draws(make_job: MakeJob) -> None:
    job = make_job(**lora(), train_text_encoder=True)
    runtime, _ = trained(job)
    write_result(job, Base.of(job), runtime.state(), [])
    sampler = {"seed": 1, "num_inference_steps": 3, "guidance_scale": 3.0, "batch_size": 1}
    ours = runtime.sample(["a bridge"], sampler)[0]
    pipe = DiffusionPipeline.from_pretrained(job.model, add_watermarker=False)
    noise = generator(1, Stream.PICTURE, 0).standard_normal((1, 4, 8, 8), dtype=np.float32)
    given = {"num_inference_steps": 3, "guidance_scale": 3.0, "latents": torch.from_numpy(noise)}
    base = np.asarray(pipe("a bridge", **given).images[0]).astype(int)
    pipe.load_lora_weights(job.out)
    theirs = np.asarray(pipe("a bridge", **given).images[0]).astype(int)
    assert abs(theirs - ours).max() <= 1 < abs(base - ours).max()


def test_adapters_of_another_model_are_refused(
    make_job: MakeJob, tiny_sd: Path, tmp_path: Path
) -> None:
    job = make_job(**lora(target_modules="attention"))
    runtime, _ = trained(job, 1)
    write_result(job, Base.of(job), runtime.state(), [])
    drawing = Drawing(out="", lora=f"{job.out}/{LORA_WEIGHTS}")
    with pytest.raises(Refused, match="for another model"):
        load_network(drawing, Base.open(tiny_sd), torch.float32, CPU)
    other = tmp_path / "bare.safetensors"
    save_file(load_file(drawing.lora), other)
    with pytest.raises(Refused, match="no valid adapter file of Kilnworks"):
        read_adapters(other)


@pytest.mark.parametrize(
    ("rank", "scale"), [(0, 1.0), (4, math.nan), (4, 10**400), (1e-300, 1e300), (None, 1.0)]
)
def test_adapters_of_an_impossible_scale_are_refused(tmp_path: Path, rank: Any, scale: Any) -> None:
    names = ("unet.conv_in.lora_A.weight", "unet.conv_in.lora_B.weight")
    settings = {"unet.r": rank, "unet.lora_alpha": scale, "unet.use_dora": False}
    header = {"lora_adapter_metadata": json.dumps(settings)}
    path = tmp_path / "hostile.safetensors"
    save_file({name: torch.ones(4, 4) for name in names}, path, metadata=header)
    with pytest.raises(Refused, match="no valid adapter file of Kilnworks"):
        read_adapters(path)


def test_stored_in_half_they_are_read_in_float32(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(**lora())
    runtime, _ = trained(job, 1)
    weights = runtime.state()["weights"]
    described = metadata(weights, Lora(**ADAPTERS))
    for dtype in (torch.float16, torch.bfloat16):
        half = {name: torch.from_numpy(array).to(dtype) for name, array in weights.items()}
        save_file(half, tmp_path / "half.safetensors", metadata=described)
        adapter = read_adapters(tmp_path / "half.safetensors")["unet"]["conv_in"]
        assert adapter.scale == 5 / 3 and adapter.magnitude is None
        stored = half["unet.conv_in.lora_A.weight"].float().numpy()
        np.testing.assert_array_equal(adapter.down, stored)


def test_evaluation_draws_with_adapters_laid_over(
    make_job: MakeJob, latents_url: str, tmp_path: Path
) -> None:
    """Pictures and held-out losses of base and tuned, whichever of them comes first."""
    job = make_job(**lora(), train_text_encoder=True)
    runtime, _ = trained(job)
    write_result(job, Base.of(job), runtime.state(), [])
    drawn: dict[str, dict[str, bytes]] = {}
    for order in ("base tuned", "tuned base"):
        drawings = [
            Drawing(
                str(tmp_path / order / n), lora=f"{job.out}/{LORA_WEIGHTS}" * (n == "tuned") or None
            )
            for n in order.split()
        ]
        given = GenerateJob(
            runtime="torch",
            model=job.model,
            drawings=tuple(drawings),
            prompts=("a bridge", "a kiln"),
            sampler=SAMPLER,
            device="cpu",
            latents=latents_url,
            holdout=HOLDOUT,
        )
        generate(given, Events())
        drawn[order] = {
            f"{folder.name}/{path.name}": path.read_bytes()
            for folder in (tmp_path / order).iterdir()
            for path in folder.iterdir()
        }
    assert drawn["base tuned"] == drawn["tuned base"]
    found = drawn["base tuned"]
    for name in ("00000.png", "00001.png", "losses.json"):
        assert found[f"base/{name}"] != found[f"tuned/{name}"]
