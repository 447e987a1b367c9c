"""Adapters: where they go and how they start; what is trained here draws the same in diffusers."""

import json
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
from safetensors.torch import load_file, save_file

from configs.training import Lora, Train
from runtimes.adapters.kohya import to_kohya
from runtimes.adapters.lora import (
    LORA_WEIGHTS,
    choose_layers,
    initial_down,
    metadata,
    read_adapters,
)
from runtimes.base import State, StepBatch, WrongInput
from runtimes.encoders import describe_encoders
from runtimes.events import Events
from runtimes.generate import generate
from runtimes.job import Drawing, GenerateJob, TrainJob
from runtimes.objective.draws import Stream, generator
from runtimes.torch.generate import load_network
from runtimes.torch.lora import add_adapters, merge_where_cheaper, merging_is_cheaper
from runtimes.torch.network import Network
from runtimes.torch.runtime import Inputs, TheRuntime
from runtimes.train.loop import make_loader, open_job_latents
from runtimes.train.result import write_result

MakeJob = Callable[..., TrainJob]
CPU = torch.device("cpu")
ALL = {"rank": 3, "alpha": 5.0, "targets": "all"}


def start(job: TrainJob) -> tuple[TheRuntime, Callable[[int], StepBatch]]:
    runtime = TheRuntime(Events())
    runtime.load(job)
    return runtime, make_loader(job, Train(**job.train), open_job_latents(job.latents)).batch


def trained(job: TrainJob, steps: int = 3, rate: float = 3e-2) -> tuple[TheRuntime, StepBatch]:
    """Far enough from the base to tell them apart, and a batch that was not trained on."""
    runtime, batch = start(job)
    for step in range(steps):
        runtime.step(batch(step), rate)
    return runtime, batch(steps)


def predicted(network: Network, batch: StepBatch) -> torch.Tensor:
    network.eval()
    given = Inputs(batch, slice(None), CPU)
    with torch.inference_mode():
        return network(given.noisy_latents, given.timesteps, given.conditioning)


def in_pipeline(job: TrainJob, pipe: Any, batch: StepBatch) -> torch.Tensor:
    """What the parts of a diffusers pipeline predict."""
    network = Network.load(replace(job, train=Train().model_dump(mode="json")), Train())
    parts = {network.family.denoiser: getattr(pipe, network.family.denoiser)}
    if "input_ids" in batch.conditioning:
        parts |= {name: getattr(pipe, name) for name in network.family.clip_encoders}
    return predicted(Network(network.family, parts), batch)


def lora(**settings: Any) -> dict[str, Any]:
    return {"method": "lora", "lora": {**ALL, **settings}, "learning_rate": 1e-2}


def layers(part: torch.nn.Module) -> set[str]:
    return {name for name, m in part.named_modules() if hasattr(m, "lora_A")}


def test_targets_are_attention_or_all_linear_or_convolutions_too(make_job: MakeJob) -> None:
    counts = {}
    for targets in ("attention", "linear", "all"):
        runtime, _ = start(make_job(**lora(targets=targets)))
        unet = runtime._network.denoiser
        found = counts[targets] = layers(unet)
        kinds = {type(dict(unet.named_modules())[name].base_layer) for name in found}
        assert torch.nn.Conv2d not in kinds or targets == "all"
    assert all(".to_" in name for name in counts["attention"])
    assert counts["attention"] < counts["linear"] < counts["all"]
    assert "time_embedding.linear_1" in counts["linear"]
    assert {"conv_in", "down_blocks.0.resnets.0.time_emb_proj"} < counts["all"]
    rest = {torch.nn.Linear, torch.nn.Conv2d}
    left = {n for n, m in unet.named_modules() if type(m) in rest and "lora_" not in n}
    assert {name.removesuffix(".base_layer") for name in left} == counts["all"]


def test_targets_may_be_ends_of_names(make_job: MakeJob) -> None:
    runtime, _ = start(make_job(**lora(targets=("to_k", "resnets.0.conv1"))))
    found = layers(runtime._network.denoiser)
    assert {name.rpartition(".")[2] for name in found} == {"to_k", "conv1"}
    assert not any(name.endswith("resnets.1.conv1") for name in found)


def test_targets_that_are_not_there_are_named_with_some_that_are(make_job: MakeJob) -> None:
    with pytest.raises(WrongInput, match=r"train\.lora\.targets: .* ends in to_x .*conv1"):
        start(make_job(**lora(targets=("to_x",))))


def test_text_encoders_have_adapters_on_attention_or_on_all_layers() -> None:
    names = ("self_attn.q_proj", "self_attn.out_proj", "mlp.fc1", "text_projection")
    known = {f"encoder.{name}": "linear" for name in names}
    chosen = {
        targets: [name.rpartition(".")[2] for name in choose_layers("text_encoder", known, lora)]
        for targets in ("attention", "all", ("to_q",))
        for lora in [Lora(targets=targets)]
    }
    assert chosen["attention"] == chosen["to_q",] == ["q_proj", "out_proj"]
    assert chosen["all"] == ["q_proj", "out_proj", "fc1"]


def test_only_adapters_train_and_at_first_they_change_nothing(make_job: MakeJob) -> None:
    for dora in (False, True):
        runtime, batch = start(make_job(**lora(dora=dora)))
        base, _ = start(make_job())
        expected = predicted(base._network, batch(0))
        torch.testing.assert_close(predicted(runtime._network, batch(0)), expected)
        names = set(runtime.state()["weights"])
        assert {name.rpartition(".lora_")[2] for name in names} == {
            "A.weight",
            "B.weight",
            *(["magnitude_vector"] if dora else []),
        }
        assert "unet.mid_block.attentions.0.proj_in.lora_A.weight" in names
        before = {n: p.clone() for n, p in runtime._network.named_parameters() if "lora_" not in n}
        runtime.step(batch(0), 1e-2)
        after = dict(runtime._network.named_parameters())
        assert all(torch.equal(weight, after[name]) for name, weight in before.items())
        assert not torch.allclose(predicted(runtime._network, batch(0)), expected)


def test_adapters_start_by_seed_and_name_alone(make_job: MakeJob) -> None:
    torch.manual_seed(1)
    one = start(make_job(**lora(), seed=4))[0].state()["weights"]
    torch.manual_seed(2)
    other = start(make_job(**lora(targets="attention"), seed=4))[0].state()["weights"]
    assert other.keys() < one.keys()
    for name, array in other.items():
        np.testing.assert_array_equal(array, one[name])
    name = "unet.conv_in.lora_A.weight"
    assert (one[name] != start(make_job(**lora(), seed=5))[0].state()["weights"][name]).any()


def test_down_starts_as_peft_starts_it() -> None:
    drawn = initial_down(0, "unet.x.lora_A.weight", (64, 32, 3, 3))
    reference = torch.nn.Conv2d(32, 64, 3, bias=False)
    torch.nn.init.kaiming_uniform_(reference.weight, a=5**0.5)
    bound = float(reference.weight.detach().abs().max())
    assert abs(drawn).max() == pytest.approx(bound, rel=0.01)
    assert drawn.std() == pytest.approx(float(reference.weight.detach().std()), rel=0.02)


def test_in_half_precision_the_base_is_half_and_adapters_are_not(make_job: MakeJob) -> None:
    for dora in (False, True):
        runtime, batch = start(make_job(**lora(dora=dora), compute_dtype="bfloat16"))
        kinds = {"lora_" in n: p.dtype for n, p in runtime._network.named_parameters()}
        assert kinds == {False: torch.bfloat16, True: torch.float32}
        full, _ = start(make_job(**lora(dora=dora)))
        for step in range(2):
            half = float(runtime.step(batch(step), 1e-2).loss)
            assert half == pytest.approx(float(full.step(batch(step), 1e-2).loss), rel=3e-2)


CASES = {
    "plain": lora(),
    "dora": lora(dora=True),
    "attention": lora(targets="attention", alpha=None),
    "texts": {**lora(), "text_encoders": True},
    "texts, dora": {**lora(dora=True), "text_encoders": True},
}


@pytest.mark.parametrize("case", CASES)
def test_diffusers_loads_what_was_trained(make_job: MakeJob, case: str) -> None:
    job = make_job(**CASES[case])
    runtime, batch = trained(job)
    assert write_result(job, runtime.state(), []) == ["history.jsonl", LORA_WEIGHTS]
    pipe = DiffusionPipeline.from_pretrained(job.model)
    base = in_pipeline(job, pipe, batch)
    pipe.load_lora_weights(job.out)
    expected = predicted(runtime._network, batch)
    assert (expected - base).abs().max() > 1e-2
    torch.testing.assert_close(in_pipeline(job, pipe, batch), expected, rtol=1e-5, atol=1e-5)
    drawing = Drawing(out="", lora=f"{job.out}/{LORA_WEIGHTS}")
    merged = load_network(drawing, Path(job.model), torch.float32, CPU)
    assert bool(merged.text_encoders) == ("text" in case)
    torch.testing.assert_close(predicted(merged, batch), expected, rtol=1e-5, atol=1e-5)


def test_the_older_family_s_load_too(
    make_job: MakeJob, tiny_sd: Path, write_latents: Callable[..., str], tmp_path: Path
) -> None:
    info = {"family": "sd", "prompt_dim": 32, "pooled_dim": None, "empty_prompt": "encoded"}
    url = write_latents(tmp_path / "sd", [{"train/8x8": 12}], **info)
    job = make_job(model=str(tiny_sd), latents=url, text_encoders=True, **lora())
    check_both_layouts(job, tmp_path)


@pytest.mark.parametrize("targets", ["attention", "all"])
def test_a_transformer_s_load_too(
    make_job: MakeJob,
    tiny_sd3: Path,
    write_latents: Callable[..., str],
    tmp_path: Path,
    targets: str,
) -> None:
    url = write_latents(tmp_path / "sd3", [{"train/8x8": 20}], **describe_encoders(tiny_sd3))
    given = {**lora(targets=targets), "text_encoders": targets == "all"}
    job = make_job(model=str(tiny_sd3), latents=url, **given)
    runtime, batch = trained(job)
    write_result(job, runtime.state(), [])
    pipe = DiffusionPipeline.from_pretrained(job.model)
    pipe.load_lora_weights(job.out)
    expected = predicted(runtime._network, batch)
    torch.testing.assert_close(in_pipeline(job, pipe, batch), expected, rtol=1e-5, atol=1e-5)
    drawing = Drawing(out="", lora=f"{job.out}/{LORA_WEIGHTS}")
    merged = load_network(drawing, Path(job.model), torch.float32, CPU)
    torch.testing.assert_close(predicted(merged, batch), expected, rtol=1e-5, atol=1e-5)
    streams = {n for n in layers(runtime._network.denoiser) if n.endswith("add_q_proj")}
    assert len(streams) == 2, "text's attention too"


@pytest.mark.parametrize("targets", ["attention", "all"])
def test_kohya_s_layout_loads_alike(make_job: MakeJob, tmp_path: Path, targets: str) -> None:
    check_both_layouts(make_job(**lora(targets=targets), text_encoders=True), tmp_path)


def check_both_layouts(job: TrainJob, folder: Path) -> None:
    runtime, batch = trained(job)
    write_result(job, runtime.state(), [])
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
    family = "sdxl" if (Path(job.model) / "text_encoder_2").exists() else "sd"
    arrays = to_kohya(read_adapters(Path(job.out) / LORA_WEIGHTS), family, unet)
    return {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items()}


def test_kohya_s_names_of_dora_are_those_that_diffusers_knows(make_job: MakeJob) -> None:
    """Its pipelines leave dora_scale out with a warning; its converter knows where it belongs."""
    job = make_job(**lora(dora=True, targets=("to_q", "to_out.0")))
    runtime, _ = trained(job)
    write_result(job, runtime.state(), [])
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
    job = make_job(**lora(), text_encoders=True)
    runtime, _ = trained(job)
    write_result(job, runtime.state(), [])
    sampler = {"seed": 1, "num_inference_steps": 3, "guidance_scale": 3.0, "batch_size": 1}
    ours = runtime.sample(["a bridge"], sampler)[0]
    pipe = DiffusionPipeline.from_pretrained(job.model, add_watermarker=False)
    noise = generator(1, Stream.PICTURE, 0).standard_normal((1, 4, 8, 8), dtype=np.float32)
    given = {"num_inference_steps": 3, "guidance_scale": 3.0, "latents": torch.from_numpy(noise)}
    base = np.asarray(pipe("a bridge", **given).images[0]).astype(int)
    pipe.load_lora_weights(job.out)
    theirs = np.asarray(pipe("a bridge", **given).images[0]).astype(int)
    assert abs(theirs - ours).max() <= 1 < abs(base - ours).max()


def assert_equal(one: State, other: State) -> None:
    assert one.keys() == other.keys()
    for group in one:
        np.testing.assert_equal(one[group], other[group])


def test_merged_or_beside_a_layer_computes_the_same() -> None:
    def adapted() -> torch.nn.Sequential:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(12, 30), torch.nn.Linear(30, 60, bias=False))
        add_adapters("unet", model, Lora(rank=4, alpha=6.0, targets=["0", "1"]), 0)
        for layer in model:
            torch.nn.init.normal_(layer.lora_B["default"].weight)
        return model

    beside, merged = adapted(), adapted()
    merge_where_cheaper(merged)
    inputs = torch.randn(50, 3, 12)
    assert merging_is_cheaper(merged[0].base_layer.weight.shape, rank=4, rows=150)
    assert not merging_is_cheaper(merged[0].base_layer.weight.shape, rank=4, rows=15)
    assert not merging_is_cheaper(merged[1].base_layer.weight.shape, rank=4, rows=150)
    outputs = [model(inputs) for model in (beside, merged)]
    for output in outputs:
        output.square().mean().backward()
    torch.testing.assert_close(*outputs)
    for one, other in zip(beside.parameters(), merged.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_restored_run_goes_on_to_the_bit(make_job: MakeJob, dropout: float) -> None:
    job = make_job(**lora(dropout=dropout), ema_decay=0.9, text_encoders=True, micro_batch_size=2)
    one, batch = start(job)
    for step in range(2):
        one.step(batch(step), 1e-2)
    other, _ = start(job)
    other.restore(one.state(), 2)
    torch.manual_seed(99)  # what is drawn elsewhere changes nothing
    for step in range(2, 4):
        one.step(batch(step), 1e-2)
    for step in range(2, 4):
        other.step(batch(step), 1e-2)
    assert_equal(one.state(), other.state())


def test_dropout_drops_in_training_alone(make_job: MakeJob) -> None:
    plain, batch = trained(make_job(**lora()))
    dropping, _ = trained(make_job(**lora(dropout=0.3)))
    name = "unet.conv_in.lora_B.weight"
    assert not np.allclose(plain.state()["weights"][name], dropping.state()["weights"][name])
    dropping.restore(plain.state(), 3)
    np.testing.assert_array_equal(dropping.errors(batch), plain.errors(batch))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora", "dora"])
def test_accumulation_and_checkpointing_leave_gradients_alone(
    make_job: MakeJob, method: str
) -> None:
    """Adam's first moment after one step is a tenth of the gradient."""
    given = {} if method == "full" else lora(dora=method == "dora")
    given |= {"text_encoders": True, "max_grad_norm": None}
    whole, _ = trained(make_job(**given), 1)
    gradients = whole.state()["exp_avg"]
    size = np.sqrt(sum(float(np.square(g).sum()) for g in gradients.values()))
    for other in ({"micro_batch_size": 1}, {"gradient_checkpointing": True}):
        same = trained(make_job(**given, **other), 1)[0].state()["exp_avg"]
        off = sum(float(np.square(same[name] - g).sum()) for name, g in gradients.items())
        assert np.sqrt(off) < 1e-5 * size


def test_adapters_of_another_model_are_refused(
    make_job: MakeJob, tiny_sd: Path, tmp_path: Path
) -> None:
    job = make_job(**lora(targets="attention"))
    runtime, _ = trained(job, 1)
    write_result(job, runtime.state(), [])
    drawing = Drawing(out="", lora=f"{job.out}/{LORA_WEIGHTS}")
    with pytest.raises(WrongInput, match="for another model"):
        load_network(drawing, tiny_sd, torch.float32, CPU)
    other = tmp_path / "bare.safetensors"
    save_file(load_file(drawing.lora), other)
    with pytest.raises(WrongInput, match="as Kilnworks writes them"):
        read_adapters(other)


def test_stored_in_half_they_are_read_in_float32(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(**lora())
    runtime, _ = trained(job, 1)
    weights = runtime.state()["weights"]
    described = metadata(weights, Lora(**ALL))
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
    job = make_job(**lora(), text_encoders=True)
    runtime, _ = trained(job)
    write_result(job, runtime.state(), [])
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
            sampler={
                "seed": 1,
                "num_inference_steps": 2,
                "guidance_scale": 3.0,
                "height": None,
                "width": None,
                "batch_size": 2,
            },
            device="cpu",
            latents=latents_url,
            holdout={"samples": 4, "draws": 1, "seed": 1, "noise_offset": 0.0},
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
