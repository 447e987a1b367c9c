"""A checkpoint file, as model sites offer them, is a pipeline folder, converted once."""

import json
import shutil
from collections.abc import Callable
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest
import single_files
import torch
from hub_server import HubServer, Repository
from loopback_server import LoopbackServer
from single_files import Tensors

from artifacts.models import digest_model_file
from configs.errors import Away, Refused
from configs.settings.recipe import Model
from runtimes.families.flux import original_weight
from runtimes.pipeline_folder.folder import Base
from runtimes.pipeline_folder.single_file import COMPONENTS, Checkpoint, convert, resolve_base

pytestmark = pytest.mark.slow
KINDS: dict[str, Callable[[Path], Tensors]] = {
    "sd": single_files.sd_tensors,
    "sdxl": single_files.sdxl_tensors,
    "flux": single_files.flux_tensors,
}


@pytest.fixture(scope="session")
def models(tiny_sd: Path, tiny_flux: Path, once: Callable[..., Path]) -> dict[str, Path]:
    """Family -> folder."""
    sdxl = once("two-widths-sdxl", single_files.save_two_widths)
    return {"sd": tiny_sd, "sdxl": sdxl, "flux": tiny_flux}


def converted(tmp_path: Path, tensors: Tensors, components: Path, **metadata: str) -> Path:
    """The folder of a file with these tensors, without the cache."""
    file = single_files.write(tmp_path / "model.safetensors", tensors, **metadata)
    convert(Checkpoint.open(file, "model.safetensors"), components, tmp_path / "out")
    return tmp_path / "out"


def assert_equal(folder: Path, expected: Tensors) -> None:
    weights = single_files.pipeline_weights(folder)
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert weights[name].dtype == tensor.dtype, name
        assert torch.equal(weights[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", KINDS)
def test_a_file_has_the_weights_of_its_pipeline(
    models: dict[str, Path], tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    model = models[family]
    tensors = {name: tensor.to(dtype) for name, tensor in KINDS[family](model).items()}
    folder = converted(tmp_path, tensors, model)
    expected = single_files.pipeline_weights(model)
    parts = Checkpoint.open(tmp_path / "model.safetensors", "").parts
    for name, tensor in expected.items():
        if name.partition(".")[0] in parts:
            expected[name] = tensor.to(dtype)
    assert_equal(folder, expected)
    assert Base.open(folder).encoders == Base.open(model).encoders


@pytest.mark.parametrize("end", ["scale_weight", "weight_scale"])
def test_8_bit_floats_are_cast_up_with_their_scales(
    models: dict[str, Path], tmp_path: Path, end: str
) -> None:
    """ComfyUI's older layout has a scale of a weight, the newer may have one of each row."""
    model = models["flux"]
    tensors = dict[str, torch.Tensor]()
    rounded = dict[str, torch.Tensor]()
    for name, weight in single_files.weights(model / "transformer").items():
        rounded[name] = weight.to(torch.bfloat16)
    original = single_files.flux_tensors(model, "model.diffusion_model.")
    for name, weight in original.items():
        tensors[name] = weight.to(torch.bfloat16)
        if name.endswith("img_attn.qkv.weight"):
            axis = () if end == "scale_weight" else 1
            scale = weight.abs().amax(axis) / 448
            tensors[name] = (weight / scale.reshape(-1, 1)).to(torch.float8_e4m3fn)
            tensors[name.removesuffix("weight") + end] = scale
            back = (tensors[name].float() * scale.reshape(-1, 1)).to(torch.bfloat16)
            layers = ("to_q", "to_k", "to_v")
            for layer, rows in zip(layers, back.chunk(3), strict=True):
                rounded[f"transformer_blocks.0.attn.{layer}.weight"] = rows
        elif name.endswith("img_mlp.0.weight"):  # without a scale
            tensors[name] = weight.to(torch.float8_e5m2)
            rounded["transformer_blocks.0.ff.net.0.proj.weight"] = tensors[name].to(torch.bfloat16)
    tensors["scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    folder = converted(tmp_path, tensors, model)
    others = single_files.pipeline_weights(model).items()
    expected = {n: t for n, t in others if not n.startswith("transformer.")}
    assert_equal(folder, expected | {f"transformer.{name}": t for name, t in rounded.items()})


def test_flux_has_the_names_by_which_diffusers_converts_it(models: dict[str, Path]) -> None:
    """diffusers knows the published width alone, and no columns: each weight has one here."""
    from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers

    width, inputs = 3072, 5
    config = {"num_attention_heads": 24, "attention_head_dim": 128}
    small = single_files.weights(models["flux"] / "transformer")
    generator = torch.Generator().manual_seed(0)
    rows = {"mod.lin": 6, "qkv": 3, "mlp.0": 4, "modulation.lin": 3, "linear1": 7, "adaLN": 2}
    names = single_files.original_flux(small, {"num_attention_heads": 2, "attention_head_dim": 16})
    original = {}
    for name, tensor in names.items():
        count = width * next((n for end, n in rows.items() if end in name), 1)
        shape = (count, inputs) if tensor.ndim == 2 else (count,)
        original[name] = torch.randn(shape, generator=generator)
    theirs = convert_flux_transformer_checkpoint_to_diffusers(dict(original))
    assert theirs.keys() == small.keys()
    for name, tensor in theirs.items():
        assert torch.equal(original_weight(name, config, original.__getitem__, len(tensor)), tensor)


def test_components_are_the_pipelines_that_diffusers_names() -> None:
    from diffusers.loaders.single_file_utils import DIFFUSERS_DEFAULT_PIPELINE_PATHS as PATHS

    for kind, place in COMPONENTS.items():
        if kind == "flux-kontext":  # whose files diffusers takes for dev's
            continue
        assert PATHS[kind] == {"pretrained_model_name_or_path": place}


def test_a_file_of_kontext_has_dev_s_weights_and_its_name_or_components_tell(
    tiny_flux_kontext: Path, tmp_path: Path, own_cache: Path
) -> None:
    tensors = single_files.flux_tensors(tiny_flux_kontext)
    for name, published in (("edits", "flux-dev"), ("flux1-dev-kontext_fp8", "flux-kontext")):
        file = single_files.write(tmp_path / f"{name}.safetensors", tensors)
        assert Checkpoint.open(file, str(file)).published == COMPONENTS[published]
        base = Base.open(resolve_base(Model(path=str(file), components=str(tiny_flux_kontext))))
        assert base.family.name == "flux_kontext"


def test_a_file_by_url_is_converted_once_with_components_of_the_hub(
    models: dict[str, Path], tmp_path: Path, own_cache: Path, hub: HubServer
) -> None:
    """The hub gives what the file lacks, and no weights of its denoiser."""
    flux = models["flux"]
    files = {str(p.relative_to(flux)): p.read_bytes() for p in flux.rglob("*") if p.is_file()}
    terms = {"LICENSE.md": b"Terms", "README.md": b"---\nlicense: mit\n---\n"}
    hub.repositories[COMPONENTS["flux-dev"]] = Repository(files | terms)
    site = tmp_path / "site"
    site.mkdir()
    file = single_files.write(site / "model", single_files.flux_tensors(flux))

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(site))  # type: ignore[arg-type]

    with LoopbackServer(Handler) as server:
        model = Model(path=f"{server.url}/model")
        folder = resolve_base(model)
        assert_equal(folder, single_files.pipeline_weights(flux))
        assert (folder / "LICENSE.md").read_bytes() == b"Terms"
        assert not (folder / "README.md").exists(), "the file may have another licence"
        assert resolve_base(model) == folder, "it is there"
        fetched = [path for _, path in hub.requests]
        assert any("text_encoder_2/model.safetensors" in path for path in fetched)
        assert not any("transformer/diffusion_pytorch_model" in path for path in fetched)
        changed = single_files.flux_tensors(flux)
        changed["img_in.bias"] += 1
        single_files.write(file, changed)
        other = resolve_base(model)
        origin = json.loads((other / "single_file.json").read_text())
        assert origin["checkpoint"] == digest_model_file(file)
        file.write_text("<!doctype html><title>Log in</title>")
        with pytest.raises(Refused, match="a site that wants a login sends a page"):
            resolve_base(model)
    assert other != folder


def test_float64_weights_become_float32(models: dict[str, Path], tmp_path: Path) -> None:
    tensors = single_files.unet_tensors(models["sdxl"])
    tensors = {name: tensor.double() for name, tensor in tensors.items()}
    file = single_files.write(tmp_path / "model.safetensors", tensors)
    assert Checkpoint.open(file, "").dtype("unet") == "float32"


def test_a_disk_without_room_for_the_weights_is_told_before_they_are_converted(
    models: dict[str, Path], tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtimes.pipeline_folder.single_file.ask", lambda *_: pytest.fail("began"))
    file = single_files.write(tmp_path / "model.safetensors", single_files.sd_tensors(models["sd"]))
    usage = shutil.disk_usage(tmp_path)._replace(free=file.stat().st_size - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(Away, match=r"no space left for the cache .*KILN_CACHE"):
        resolve_base(Model(path=str(file), components=str(models["sd"])))


def test_the_header_names_licence_and_prediction(models: dict[str, Path], tmp_path: Path) -> None:
    marks = {"v_pred": torch.zeros(0), "ztsnr": torch.zeros(0)}
    tensors = single_files.sdxl_tensors(models["sdxl"]) | marks
    licence = {"modelspec.license": "Fair AI: no resale"}
    folder = converted(tmp_path, tensors, models["sdxl"], **licence)
    base = Base.open(folder)
    assert base.scheduler["prediction_type"] == "v_prediction"
    assert base.scheduler["rescale_betas_zero_snr"]
    from tasks.publish.model_card import base_card

    assert base_card(folder) == {"license": "other", "license_name": "Fair AI: no resale"}


def test_a_part_that_the_file_lacks_is_that_of_its_components(
    models: dict[str, Path], tmp_path: Path
) -> None:
    tensors = single_files.unet_tensors(models["sdxl"])
    folder = converted(tmp_path, tensors, models["sdxl"])
    assert_equal(folder, single_files.pipeline_weights(models["sdxl"]))
    before = (models["sdxl"] / "unet/config.json").read_text()
    assert (models["sdxl"] / "unet/config.json").read_text() == before


def test_what_is_no_checkpoint_of_its_components_is_refused_in_a_line(
    models: dict[str, Path], tmp_path: Path, own_cache: Path
) -> None:
    def refused(components: Path, tensors: Tensors | None = None) -> str:
        file = tmp_path / "some.safetensors"
        if tensors is not None:
            single_files.write(file, tensors)
        with pytest.raises(Refused) as error:
            resolve_base(Model(path=str(file), components=str(components)))
        assert "\n" not in str(error.value)
        return str(error.value)

    sdxl = single_files.sdxl_tensors(models["sdxl"])
    whole = single_files.write(tmp_path / "some.safetensors", sdxl).read_bytes()
    (tmp_path / "some.safetensors").write_bytes(whole[:-9])
    assert "some.safetensors is no valid safetensors file" in refused(models["sdxl"])
    lora = {"lora_unet_x.lora_down.weight": torch.zeros(2, 2)}
    assert "train.lora.start" in refused(models["sdxl"], lora)
    assert "SD 1 and 2, SDXL and FLUX.1" in refused(models["sdxl"], {"weight": torch.zeros(1)})
    assert "has integers" in refused(
        models["sdxl"], sdxl | {"x.weight": torch.zeros(2, dtype=torch.int8)}
    )
    words = refused(models["flux"], sdxl)
    assert "model.components" in words and "family flux, and" in words and "is of sdxl" in words
    bare = Path(shutil.copytree(models["flux"], tmp_path / "bare"))
    (bare / "text_encoder_2/model.safetensors").unlink()
    assert "no weights of text_encoder_2" in refused(bare, single_files.flux_tensors(bare))
    with pytest.raises(Refused, match="can run code"):
        resolve_base(Model(path="pony.ckpt"))
    with pytest.raises(Refused, match="for a checkpoint file"):
        resolve_base(Model(path=str(models["sd"]), components=str(models["sd"])))


def test_weights_that_do_not_fit_the_components_are_refused(
    models: dict[str, Path], tmp_path: Path
) -> None:
    sdxl = single_files.sdxl_tensors(models["sdxl"])
    fewer = {name: t for name, t in sdxl.items() if "input_blocks.3.1.proj_in" not in name}
    with pytest.raises(Refused, match="it lacks weights that these describe"):
        converted(tmp_path, fewer, models["sdxl"])
    alone = {name: t for name, t in sdxl.items() if "embedders.1" not in name}
    with pytest.raises(Refused, match="Failed to load CLIPTextModel"):
        converted(tmp_path, alone, models["sdxl"])
    wide = sdxl | {"model.diffusion_model.out.2.bias": torch.zeros(9)}
    with pytest.raises(Refused, match="does not fit the configs of"):
        converted(tmp_path, wide, models["sdxl"])
