"""Training starts with adapters of any layout, and an assistant is part of the frozen base."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs import MakeJob, predicted, start
from safetensors.numpy import save_file
from training import results, train

from artifacts.safetensors import Arrays, write_arrays
from configs.errors import Refused
from configs.settings.train import Train
from configs.settings.train_parts import Lora
from runtimes.adapters.lora import Adapter
from runtimes.adapters.lora_files import metadata, read_scaled, to_kohya
from runtimes.adapters.read_layouts import Layers, read_assistant, read_file, read_start
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import TrainJob
from runtimes.torch_models import loading
from runtimes.torch_models.network import Network

pytestmark = pytest.mark.slow
RANK, ALPHA = 2, 3.0
#: Fixture of the base, components, ends of the adapted layers, and whether with DoRA.
CASES = {
    "sd": ("tiny_sd", ("unet", "text_encoder"), ("to_k", "q_proj"), False),
    "sdxl": ("tiny_sdxl", ("unet", "text_encoder_2"), ("to_k", "conv1", "q_proj"), False),
    "dora": ("tiny_sdxl", ("unet",), ("to_k", "proj_in"), True),
    "flux": ("tiny_flux", ("transformer",), ("to_q", "to_v", "to_out.0", "linear_1"), False),
    "z_image": ("tiny_z_image", ("transformer",), ("to_q", "to_out.0"), False),
}


def random_adapters(
    base: Base, parts: tuple[str, ...], ends: tuple[str, ...], *, dora: bool = False
) -> dict[str, dict[str, Adapter]]:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return rng.normal(size=shape).astype(np.float32)

    def made(out: int, *into: int) -> Adapter:
        magnitude = np.abs(draw(out)) if dora else None
        up = draw(out, RANK, *[1] * (len(into) - 1))
        return Adapter(draw(RANK, *into), up, magnitude, ALPHA / RANK)

    shapes = Layers(base).shapes
    return {
        part: {name: made(*shape) for name, shape in shapes[part].items() if name.endswith(ends)}
        for part in parts
    }


def named(adapters: dict[str, dict[str, Adapter]], prefix: bool = True) -> Arrays:
    """The arrays of a file by diffusers' names; of PEFT's without a component."""
    arrays: Arrays = {}
    for part, layers in adapters.items():
        for layer, adapter in layers.items():
            name = f"{part}.{layer}" if prefix else f"base_model.model.{layer}"
            arrays |= {f"{name}.lora_A.weight": adapter.down, f"{name}.lora_B.weight": adapter.up}
            if adapter.magnitude is not None:
                arrays[f"{name}.lora_magnitude_vector"] = adapter.magnitude
    return arrays


def write_script(path: Path, adapters: dict[str, dict[str, Adapter]]) -> Path:
    """A file with the names that diffusers' training scripts give."""
    from diffusers.utils import convert_state_dict_to_diffusers

    renamed = convert_state_dict_to_diffusers(named(adapters))
    with path.open("wb") as stream:
        write_arrays(stream, renamed, metadata(named(adapters), Lora(rank=RANK, alpha=ALPHA)))
    return path


def write_layouts(folder: Path, base: Base, adapters: dict[str, dict[str, Adapter]]) -> list[Path]:
    """The adapters in the layouts of diffusers, kohya and, of one component, PEFT."""
    settings = Lora(rank=RANK, alpha=ALPHA, dora="magnitude" in str(named(adapters).keys()))
    with (folder / "diffusers.safetensors").open("wb") as stream:
        write_arrays(stream, named(adapters), metadata(named(adapters), settings))
    assert base.family.kohya is not None
    save_file(to_kohya(adapters, base.family.kohya, base.denoiser), folder / "kohya.safetensors")
    files = [folder / "diffusers.safetensors", folder / "kohya.safetensors"]
    if len(adapters) == 1:
        (folder / "peft").mkdir()
        files.append(folder / "peft/adapter_model.safetensors")
        save_file(named(adapters, prefix=False), files[-1])
        config = {"r": RANK, "lora_alpha": ALPHA}
        (folder / "peft/adapter_config.json").write_text(json.dumps(config))
    return files


@pytest.mark.parametrize("case", CASES)
def test_adapters_of_each_layout_are_the_same(
    request: pytest.FixtureRequest, tmp_path: Path, case: str
) -> None:
    fixture, parts, ends, dora = CASES[case]
    base = Base.open(request.getfixturevalue(fixture))
    adapters = random_adapters(base, parts, ends, dora=dora)
    files = write_layouts(tmp_path, base, adapters)
    if not dora:
        files.append(write_script(tmp_path / "script.safetensors", adapters))
    for path in files:
        found = read_file(path, base, path.name)
        assert found.keys() == adapters.keys()
        for part, layers in adapters.items():
            assert found[part].keys() == layers.keys(), path.name
            for layer, adapter in layers.items():
                own = found[part][layer]
                assert own.scale == pytest.approx(adapter.scale)
                for name in ("down", "up", "magnitude"):
                    np.testing.assert_array_equal(getattr(own, name), getattr(adapter, name))


def test_a_layer_that_another_trainer_fused_has_its_down_for_all(
    tiny_flux: Path, tmp_path: Path
) -> None:
    base = Base.open(tiny_flux)
    rng = np.random.default_rng(1)
    down, up = (rng.normal(size=s).astype(np.float32) for s in ((RANK, 32), (7 * 32, RANK)))
    name = "lora_unet_single_blocks_1_linear1"
    arrays = {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
    save_file(arrays | {f"{name}.alpha": np.array(1.0, np.float32)}, tmp_path / "file")
    layers = read_file(tmp_path / "file", base, "file")["transformer"]
    block = "single_transformer_blocks.1"
    rows = {f"{block}.attn.to_{which}": (n * 32, 32) for n, which in enumerate("qkv")}
    rows[f"{block}.proj_mlp"] = (96, 128)
    assert layers.keys() == rows.keys()
    for layer, (first, count) in rows.items():
        assert layers[layer].scale == 0.5
        product = layers[layer].up @ layers[layer].down
        np.testing.assert_allclose(product, (up @ down)[first : first + count], rtol=1e-6)


def test_a_training_starts_with_the_file_s_adapters(make_job: MakeJob, tmp_path: Path) -> None:
    """Another alpha than the recipe's is in the weights then."""
    lora = {"rank": RANK, "alpha": 5.0}
    job = make_job(method="lora", lora=lora, train_text_encoder=True)
    base, settings = Base.of(job), Train(**job.train)
    attention = ("to_q", "to_k", "to_v", "to_out.0", "q_proj", "k_proj", "v_proj", "out_proj")
    parts = ("unet", "text_encoder", "text_encoder_2")
    adapters = random_adapters(base, parts, attention)
    (_, path) = write_layouts(tmp_path, base, adapters)
    with (tmp_path / "start").open("wb") as stream:
        write_arrays(stream, read_start(path, base, settings, "kohya"))
    still = {**job.train, "learning_rate": 1e-30}
    train(replace(job, adapters=str(tmp_path / "start"), train=still))
    started = read_file(Path(job.out) / "pytorch_lora_weights.safetensors", base, "out")
    for part, layers in adapters.items():
        for layer, adapter in layers.items():
            own = started[part][layer]
            delta = own.scale * own.up @ own.down
            expected = adapter.scale * adapter.up @ adapter.down
            np.testing.assert_allclose(delta, expected, rtol=1e-5, atol=1e-6)


def test_other_adapters_than_the_training_s_are_refused(tiny_sdxl: Path, tmp_path: Path) -> None:
    base = Base.open(tiny_sdxl)
    attention = base.family.attention_layers
    whole = random_adapters(base, ("unet",), attention)
    texts = random_adapters(base, ("unet", "text_encoder"), (*attention, "q_proj"))
    dora = random_adapters(base, ("unet",), attention, dora=True)

    def refused(arrays: Arrays, path: str = "file", **lora: Any) -> str:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        save_file(arrays, tmp_path / path)
        settings = Train(method="lora", lora=Lora(rank=lora.pop("rank", RANK), **lora))
        with pytest.raises(Refused) as error:
            read_start(tmp_path / path, base, settings, "file")
        return str(error.value)

    assert "train.lora.rank is 4: set that" in refused(named(whole), rank=4)
    assert "train.lora.dora: true" in refused(named(dora))
    assert "has no magnitudes" in refused(named(whole), dora=True)
    assert "file: of the unet it does not adapt" in refused(named(whole), target_modules="linear")
    assert "leaves out, such as" in refused(named(whole), target_modules=("to_q", "to_k"))
    assert "train.train_text_encoder: true" in refused(named(texts))
    unknown = {"lora_unet_x.lora_down.weight": np.zeros((2, 2), np.float32)}
    assert "has no layer lora_unet_x" in refused(unknown)
    lokr = {"lora_unet_mid_block.lokr_w1": np.zeros((2, 2), np.float32)}
    assert "not of a LoRA or DoRA of diffusers, PEFT or kohya" in refused(lokr)
    model = {"model.diffusion_model.out.2.bias": np.zeros(2, np.float32)}
    assert "a whole model belongs in model.path" in refused(model)
    assert "adapter_config.json" in refused(named(whole, prefix=False), "alone/file")
    wide = {n: np.zeros((9, 9), np.float32) for n in named(whole)}
    assert "has other shapes" in refused(wide)
    (tmp_path / "cut").write_bytes(b"cut")
    with pytest.raises(Refused, match="no valid file of adapters"):
        read_start(tmp_path / "cut", base, Train(), "cut")
    save_file(named(texts), tmp_path / "file")
    with pytest.raises(Refused, match="adapts the denoiser alone"):
        read_assistant(tmp_path / "file", base, "file")


def with_assistant(job: TrainJob, folder: Path, factor: float = 1.0) -> TrainJob:
    """The job, with adapters of random numbers as its assistant."""
    base = Base.of(job)
    adapters = random_adapters(base, ("unet",), ("to_q", "to_out.0", "conv2"))
    for layer, adapter in adapters["unet"].items():
        up = adapter.up * np.float32(factor)
        adapters["unet"][layer] = replace(adapter, up=up)
    path = write_layouts(folder, base, adapters)[1]
    with (folder / "assistant").open("wb") as stream:
        write_arrays(stream, read_assistant(path, base, "kohya"))
    return replace(job, assistant=str(folder / "assistant"))


def test_an_assistant_computes_what_peft_computes_with_two_adapters(
    make_job: MakeJob, tmp_path: Path
) -> None:
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    plain = make_job(method="lora", lora={"rank": 3, "target_modules": "all"})
    job = with_assistant(plain, tmp_path, 0.01)
    settings = Train(**job.train)
    assert job.assistant is not None
    assistant = read_scaled(job.assistant)["unet"]
    networks = [Network.load(some, Base.of(some), settings) for some in (job, plain)]
    ours, theirs = networks
    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=[*assistant])  # type: ignore[arg-type]
    inject_adapter_in_model(config, theirs.denoiser, adapter_name="assistant")
    with torch.no_grad():
        for name, layer in theirs.denoiser.named_modules():
            if isinstance(layer, LoraLayer):
                if name in assistant:
                    layer.lora_A["assistant"].weight.copy_(torch.tensor(assistant[name].down))
                    layer.lora_B["assistant"].weight.copy_(torch.tensor(assistant[name].up))
                layer.set_adapter([a for a in ("default", "assistant") if a in layer.lora_A])
        for network in networks:
            for name, weight in network.named_parameters():
                if ".lora_B.default." in name:
                    weight.fill_(0.01)
    batch = start(plain)[1](0)
    torch.testing.assert_close(
        predicted(ours, batch), predicted(theirs, batch), rtol=1e-6, atol=1e-6
    )


def test_a_zero_assistant_changes_no_bit_and_another_is_in_no_file(
    make_job: MakeJob, tmp_path: Path
) -> None:
    settings = {"method": "lora", "lora": {"rank": 2}, "mixed_precision": "bf16", "steps": 3}
    for name in ("zero", "other"):
        (tmp_path / name).mkdir()
    jobs = [
        make_job("plain", **settings),
        with_assistant(make_job("zero", **settings), tmp_path / "zero", 0.0),
        with_assistant(make_job("other", **settings), tmp_path / "other"),
    ]
    for job in jobs:
        train(job)
    plain, zero, other = map(results, jobs)
    assert zero == plain != other
    plain_file, _, file = (Path(job.out) / "pytorch_lora_weights.safetensors" for job in jobs)
    base = Base.of(jobs[0])
    layers = read_file(file, base, "")["unet"].keys()
    assert layers == read_file(plain_file, base, "")["unet"].keys()


def test_an_assistant_is_merged_before_weights_are_rounded_or_sharded(
    make_job: MakeJob, tmp_path: Path
) -> None:
    plain = make_job(method="lora", lora={"rank": 2})
    job = with_assistant(plain, tmp_path)
    base = Base.of(job)
    assert job.assistant is not None
    assistant = read_scaled(job.assistant)["unet"]
    whole = loading.load_denoiser(base.denoiser_folder, adapters=assistant)
    merged = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    name = next(iter(assistant))
    stored = loading.load_denoiser(base.denoiser_folder).state_dict()[f"{name}.weight"]
    expected = torch.from_numpy(assistant[name].merged(stored.numpy()))
    assert torch.equal(merged[f"{name}.weight"], expected)
    whole.save_pretrained(tmp_path / "merged")
    int8 = [
        loading.load_denoiser(folder, precision="int8", adapters=adapters).state_dict()
        for folder, adapters in ((base.denoiser_folder, assistant), (tmp_path / "merged", {}))
    ]
    assert all(torch.equal(int8[0][name], tensor) for name, tensor in int8[1].items())
    _, unread = Network.load_unread(job, base, Train(**job.train))
    for key, rows in unread.items():
        layer = key.removeprefix("unet.").replace(".base_layer", "")
        assert torch.equal(rows[1:3], merged[layer][1:3]), "a process reads its rows alone"
