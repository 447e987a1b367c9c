"""Adapters are published alone, or merged with separate copies; both load."""

import ast
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from diffusers import StableDiffusionXLPipeline
from huggingface_hub import ModelCard
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from store_drafts import commit, drawn_picture
from tiny_adapters import RANK, make_lora
from toy_recipes import drawn_by

from artifacts.safetensors import write_arrays
from artifacts.store import Artifact, KeyParts, Store
from configs.errors import Away, Refused
from configs.load_recipe import load_recipe
from configs.settings.recipe import Recipe
from configs.settings.train_parts import Lora
from runtimes.adapters.lora_files import LORA_WEIGHTS, metadata, read_adapters
from runtimes.families import family_named
from runtimes.pipeline_folder.folder import Base
from tasks.evaluate.distances import Estimate, to_npz
from tasks.evaluate.published import load_published_model
from tasks.evaluate.stage import metrics_by_name
from tasks.publish import smoke_test
from tasks.publish.assemble import assemble, write_adapters
from tasks.publish.model_card import has_vae_folder
from tasks.publish.stage import PublishStage, registry_of, settings_for_key
from tasks.train import STAGE as TRAIN
from tasks.trained_weights import local_weights, weights_content

pytestmark = pytest.mark.slow

METRICS = {"cmmd": Estimate(1.0, 10, np.linspace(0.5, 1.5, 41))}


def digits(folder: Path, base: Path, **more: Any) -> Recipe:
    return load_recipe(
        "digits",
        {
            "store": str(folder / "store"),
            "model.path": str(base),
            "train.method": "lora",
            "train.lora.rank": RANK,
            "publish.gate": [],
            "publish.smoke_test": False,
            **more,
        },
    )


def train(folder: Path, recipe: Recipe, **more: bytes) -> Artifact:
    lora = make_lora(folder / "lora.safetensors").read_bytes()
    files = {LORA_WEIGHTS: lora, "history.jsonl": b"", "boards/events": b"", **more}
    return commit(Store(recipe.store), TRAIN, files)


def publish(folder: Path, recipe: Recipe, vae: Path | None = None, **more: bytes) -> Artifact:
    store = Store(recipe.store)
    models = {"base": METRICS, "tuned": METRICS}
    measured = {"metrics": metrics_by_name(models), "fingerprint": "f"}
    written = {
        "metrics.json": json.dumps(measured).encode(),
        "bootstrap.npz": to_npz(models),
        "before_after.png": b"png",
    }
    drawn = {"tuned": drawn_picture(store, folder)}
    evaluated = commit(store, "evaluate", written, drawn=drawn)
    draft = store.draft(KeyParts("publish", 1, settings_for_key(recipe), {}))
    trained = train(folder, recipe, **more)
    base = Base.open(Path(recipe.model.path), vae)
    stage = PublishStage(recipe, base, trained, evaluated, lineage={"base": "b"})
    summary = stage.build(draft, lambda *a: None)
    return draft.commit(summary, {"parents": {}})


def files(artifact: Artifact) -> set[str]:
    return {entry.path for entry in artifact.files}


def test_adapters_alone_are_published_without_the_base(tmp_path: Path, tiny_sdxl: Path) -> None:
    recipe = digits(tmp_path, tiny_sdxl)
    artifact = publish(tmp_path, recipe)
    assert files(artifact) == {
        "README.md",
        "before_after.png",
        "bootstrap.npz",
        "comfyui.json",
        "comfyui.png",
        "digits_kohya.safetensors",
        "gate.json",
        "metrics.json",
        LORA_WEIGHTS,
        "recipe.yaml",
    }
    version = registry_of(recipe).publish(artifact)
    smoke_test.draw(smoke_test.describe(Path(version.uri), Base.open(tiny_sdxl), *drawn_by(recipe)))
    pipe = StableDiffusionXLPipeline.from_pretrained(tiny_sdxl)
    pipe.load_lora_weights(version.uri)
    layer = pipe.unet.conv_in
    assert layer.scaling["default_0"] == 1.0
    stored = load_file(Path(version.uri) / LORA_WEIGHTS)["unet.conv_in.lora_A.weight"]
    assert stored.dtype == torch.float16
    assert torch.equal(layer.lora_A["default_0"].weight, stored.float())
    assert {panel.title for panel in PublishStage.show(artifact)} >= {"Gate", "Model"}
    card = artifact.read("README.md").decode()
    assert "| ComfyUI | `digits_kohya.safetensors` |" in card and "drag `comfyui.png`" in card


def here(code: str, published: Artifact, base: Path) -> str:
    """The code of a card, with the folders of this machine, in one step."""
    code = code.replace("path/to/this/folder", published.path)
    code = code.replace(f"path/to/{base.name}", str(base))
    return code.replace("num_inference_steps=20", "num_inference_steps=1")


def test_the_card_names_the_base_and_loads_the_adapters(tmp_path: Path, tiny_sdxl: Path) -> None:
    alone = publish(tmp_path, digits(tmp_path, tiny_sdxl))
    card = alone.read("README.md").decode()
    head = ModelCard.load(Path(alone.path, "README.md")).data.to_dict()
    assert "base_model" not in head, "the hub knows no local folders"
    assert f"from_pretrained('path/to/{tiny_sdxl.name}', " in card
    assert f"path: {tiny_sdxl.name}\n" in card and str(tiny_sdxl) not in card
    assert "lora" in head["tags"]
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    assert code and "load_lora_weights" in code[1]
    exec(here(code[1], alone, tiny_sdxl))
    recipe = digits(tmp_path / "merged", tiny_sdxl, **{"publish.merge": True})
    (tmp_path / "merged").mkdir()
    merged = publish(tmp_path / "merged", recipe).read("README.md").decode()
    assert "load_lora_weights" not in merged and "`lora/`" in merged


def test_merged_adapters_make_a_whole_pipeline(tmp_path: Path, tiny_sdxl: Path) -> None:
    more = {"publish.merge": True, "publish.dtype": "float32"}
    artifact = publish(tmp_path, digits(tmp_path, tiny_sdxl, **more))
    assert {f"lora/{LORA_WEIGHTS}", "lora/digits_kohya.safetensors"} < files(artifact)
    whole = StableDiffusionXLPipeline.from_pretrained(artifact.path)
    base = StableDiffusionXLPipeline.from_pretrained(tiny_sdxl)
    base.load_lora_weights(f"{artifact.path}/lora")
    base.fuse_lora()
    base.unload_lora_weights()
    for part in ("unet", "text_encoder", "text_encoder_2"):
        expected = getattr(base, part).state_dict()
        for name, weight in getattr(whole, part).state_dict().items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6, msg=name)


def test_alpha_of_a_kohya_file_is_exact_in_half_precision(tmp_path: Path, tiny_sdxl: Path) -> None:
    artifact = publish(tmp_path, digits(tmp_path, tiny_sdxl))
    kohya = load_file(Path(artifact.path) / "digits_kohya.safetensors")
    alphas = {
        (tensor.item(), tensor.dtype) for name, tensor in kohya.items() if name.endswith(".alpha")
    }
    kinds = {tensor.dtype for name, tensor in kohya.items() if not name.endswith(".alpha")}
    assert alphas == {(5.0, torch.float32)} and kinds == {torch.float16}


def test_both_files_have_the_trained_strength_without_the_header(
    tmp_path: Path, tiny_sdxl: Path
) -> None:
    """ComfyUI reads the keys `.alpha` and no header; without such keys, its scale is 1."""
    artifact = publish(tmp_path, digits(tmp_path, tiny_sdxl, **{"publish.dtype": "float32"}))
    file, kohya_file = (Path(artifact.path) / n for n in (LORA_WEIGHTS, "digits_kohya.safetensors"))
    weights, kohya = load_file(file), load_file(kohya_file)
    expected = read_adapters(tmp_path / "lora.safetensors")["unet"]["conv_in"]
    assert expected.scale == 2.5
    down, up = (weights[f"unet.conv_in.lora_{side}.weight"].numpy() for side in "AB")
    np.testing.assert_array_equal(down, expected.down)
    np.testing.assert_array_equal(up, np.float32(2.5) * expected.up)
    assert not any(name.endswith("alpha") for name in weights)
    layer = "lora_unet_input_blocks_0_0"
    np.testing.assert_array_equal(kohya[f"{layer}.lora_up.weight"].numpy(), expected.up)
    assert kohya[f"{layer}.alpha"] == 2.5 * RANK


Header = Mapping[str, str]


def version_for_automatic1111(header: Header) -> str:
    """Of the base that its LoRA page shows adapters beside; beside others it hides them."""
    if header.get("ss_base_model_version", "").startswith("sdxl_"):
        return "SDXL"
    return "SD2" if header.get("ss_v2") == "True" else "SD1"


def version_for_forge(header: Header) -> str | None:
    """The same of Forge, which shows what it does not know beside every base."""
    architecture = header.get("modelspec.architecture")
    if header.get("modelspec.implementation") == "https://github.com/black-forest-labs/flux":
        return "Flux"
    if architecture == "stable-diffusion-xl-v1-base/lora":
        return "SDXL"
    if header.get("ss_v2") == "True":
        return "SD2"
    return "SD1" if architecture == "stable-diffusion-v1/lora" else None


FLUX = {"num_attention_heads": 24, "attention_head_dim": 128}
PLACE = "transformer_blocks.0.attn.to_out.0"
#: Family, denoiser's config, a layer; version in its trainer, for AUTOMATIC1111 and for Forge.
BASES = [
    ("sd", {"cross_attention_dim": 768}, "conv_in", "sd_v1", "SD1", "SD1"),
    ("sd", {"cross_attention_dim": 1024}, "conv_in", "sd_v2", "SD2", "SD2"),
    ("sdxl", {"layers_per_block": 2}, "conv_in", "sdxl_base_v1-0", "SDXL", "SDXL"),
    ("flux", {**FLUX, "guidance_embeds": True}, PLACE, "flux1", None, "Flux"),
    ("flux", {**FLUX, "guidance_embeds": False}, PLACE, "flux1", None, "Flux"),
    ("flux2", FLUX, PLACE, "flux_2_klein_4b", None, None),
    ("flux2", {**FLUX, "num_attention_heads": 32}, PLACE, "flux_2_klein_9b", None, None),
    ("z_image", {}, "layers.0.attention.to_q", "z_image", None, None),
    ("qwen_image", {}, PLACE, "qwen_image", None, None),
]


def write_base(folder: Path, name: str, config: Mapping[str, Any], **scheduler: str) -> Path:
    """The configs of a base, without weights."""
    family = family_named(name)
    index = {"_class_name": family.pipelines[0]}
    parts = {"scheduler/scheduler_config": scheduler, f"{family.denoiser}/config": config}
    for path, content in {"model_index": index, **parts}.items():
        file = folder / f"{path}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content), encoding="utf-8")
    return folder


def kohya_header(folder: Path, base: Path, layer: str) -> dict[str, str]:
    """The header of the file in kohya's layout for adapters of one layer."""
    part = Base.open(base).family.denoiser
    sides = {"A": np.ones((4, 8), np.float32), "B": np.ones((8, 4), np.float32)}
    arrays = {f"{part}.{layer}.lora_{side}.weight": array for side, array in sides.items()}
    with (folder / "lora.safetensors").open("wb") as stream:
        write_arrays(stream, arrays, metadata(arrays, Lora(rank=4, alpha=2.0)))
    given = {"name": "foxes", "dtype": "float16", "scheduler": None}
    write_adapters(folder / "lora.safetensors", Base.open(base), folder / "out", **given)
    with safe_open(folder / "out/foxes_kohya.safetensors", "np") as stored:
        return dict(stored.metadata())


@pytest.mark.parametrize(("family", "config", "layer", "version", "automatic1111", "forge"), BASES)
def test_web_uis_show_adapters_beside_their_base(
    family: str,
    config: dict[str, Any],
    layer: str,
    version: str,
    automatic1111: str | None,
    forge: str | None,
    tmp_path: Path,
) -> None:
    header = kohya_header(tmp_path, write_base(tmp_path, family, config), layer)
    if automatic1111 is not None:  # it has none of the later bases
        assert version_for_automatic1111(header) == automatic1111
    assert version_for_forge(header) == forge
    names = family_named(family).kohya
    assert names is not None
    fields = {name.removeprefix("ss_"): header[name] for name in header if name.startswith("ss_")}
    assert fields == {
        "base_model_version": version,
        "network_alpha": "2.0",
        "network_dim": "4",
        "network_module": names.network_module,
        "output_name": "foxes",
        "v2": str(version == "sd_v2"),
    }


def test_the_header_of_a_v_predicting_base_says_so(tmp_path: Path) -> None:
    config = {"cross_attention_dim": 1024}
    base = write_base(tmp_path, "sd", config, prediction_type="v_prediction")
    header = kohya_header(tmp_path, base, "conv_in")
    assert header["ss_base_model_version"] == "sd_v2_v"
    assert header["modelspec.architecture"] == "stable-diffusion-v2-768-v/lora"


def test_files_of_adapters_are_the_same_bytes_each_time(tmp_path: Path, tiny_sdxl: Path) -> None:
    lora = make_lora(tmp_path / "lora.safetensors")
    given = {"name": "x", "dtype": "float16", "scheduler": None}
    for number in range(12):
        write_adapters(lora, Base.open(tiny_sdxl), tmp_path / f"{number}", **given)
    for name in (LORA_WEIGHTS, "x_kohya.safetensors"):
        assert len({(tmp_path / f"{number}" / name).read_bytes() for number in range(12)}) == 1


def test_published_adapters_are_read_with_the_trained_strength(
    tmp_path: Path, tiny_sdxl: Path
) -> None:
    artifact = publish(tmp_path, digits(tmp_path, tiny_sdxl, **{"publish.dtype": "float32"}))
    trained, read = (
        read_adapters(path)
        for path in (tmp_path / "lora.safetensors", Path(artifact.path) / LORA_WEIGHTS)
    )
    assert trained.keys() == read.keys() == {"unet", "text_encoder", "text_encoder_2"}
    for part, layers in trained.items():
        for name, adapter in layers.items():
            base = np.ones((len(adapter.up), *adapter.down.shape[1:]), np.float32)
            np.testing.assert_allclose(
                read[part][name].merged(base), adapter.merged(base), rtol=1e-5, atol=1e-6
            )
            assert read[part][name].scale == 1.0


def test_adapters_of_another_base_are_not_merged(
    tmp_path: Path, tiny_sd: Path, tiny_sdxl: Path
) -> None:
    adapters = read_adapters(make_lora(tmp_path / "lora.safetensors"))
    adapters["unet"]["conv_out_of_place"] = adapters["unet"].pop("conv_in")
    with pytest.raises(ValueError, match="it has no conv_out_of_place"):
        assemble(Base.open(tiny_sdxl), {}, tmp_path / "out", dtype="float32", adapters=adapters)


def test_a_champion_of_adapters_samples_with_its_base(
    tmp_path: Path, tiny_sdxl: Path, tiny_vae: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Path(shutil.copytree(tiny_sdxl, tmp_path / "base"))
    alone = publish(tmp_path, digits(tmp_path, base, **{"model.vae": str(tiny_vae)}))
    model = load_published_model(Path(alone.path))
    assert model.base == Base.open(base, tiny_vae)
    assert model.weights.lora == Path(alone.path) / LORA_WEIGHTS and not model.weights.parts
    card = Path(alone.path) / "README.md"
    card.write_text("other words", encoding="utf-8")
    assert load_published_model(Path(alone.path)).digest == model.digest
    shutil.rmtree(base)
    with pytest.raises(Refused, match="the base of its adapters is missing"):
        load_published_model(Path(alone.path))

    def away(*_: Any, **__: Any) -> Path:
        raise Away("model some/base: the hub cannot be reached")

    monkeypatch.setattr("tasks.evaluate.published.resolve_base", away)
    with pytest.raises(Away, match="the base of its adapters"):  # so that it is tried again
        load_published_model(Path(alone.path))
    with pytest.raises(Refused, match="neither a pipeline, adapters"):
        load_published_model(tmp_path)


@pytest.mark.parametrize("merge", [False, True])
def test_no_published_file_has_a_path_of_this_machine(
    merge: bool, tmp_path: Path, tiny_sdxl: Path
) -> None:
    """Pictures, base, store and key are in the publisher's home; prompts may begin with a slash."""
    base = Path(shutil.copytree(tiny_sdxl, tmp_path / "base"))
    configs = [*base.rglob("*config.json"), base / "model_index.json"]
    for path in configs:
        config = json.loads(path.read_text()) | {"_name_or_path": f"{base}/earlier"}
        path.write_text(json.dumps(config))
    secret = {"publish.merge": merge, "publish.signing_key": f"{tmp_path}/keys/mine.pem"}
    source = {"kind": "folder", "path": f"{tmp_path}/pictures"}
    drawn = {"evaluate.prompts": {"new": {"prompts": ["/s/ is no path"]}}}
    places = {"evaluate.clip": f"file://{tmp_path}/clip", "shared_folders": [f"{tmp_path}/nfs"]}
    artifact = publish(tmp_path, digits(tmp_path, base, source=source, **secret, **drawn, **places))
    for path in files(artifact):
        assert str(tmp_path).encode() not in artifact.read(path), path
    recipe = yaml.safe_load(artifact.read("recipe.yaml"))
    assert (recipe["source"]["path"], recipe["store"]) == ("pictures", "store")
    assert (recipe["model"]["path"], recipe["evaluate"]["clip"]) == ("base", "clip")
    assert recipe["evaluate"]["prompts"]["new"]["prompts"] == ["/s/ is no path"]


def test_a_merged_champion_is_a_pipeline(tmp_path: Path, tiny_sdxl: Path) -> None:
    merged = publish(tmp_path, digits(tmp_path, tiny_sdxl, **{"publish.merge": True}))
    model = load_published_model(Path(merged.path))
    assert model.base.folder == Path(merged.path) and model.weights.lora is None


def test_adapters_are_published_with_their_scheduler(tmp_path: Path, tiny_sdxl: Path) -> None:
    name = "scheduler/scheduler_config.json"
    config = json.loads((tiny_sdxl / name).read_text())
    own = json.dumps({**config, "prediction_type": "v_prediction"}).encode()
    alone = publish(tmp_path, digits(tmp_path, tiny_sdxl), **{name: own})
    assert alone.read(name) == own
    code = re.search(r"```python\n(.*?)```", alone.read("README.md").decode(), re.DOTALL)
    assert code
    run: dict[str, Any] = {}
    exec(here(code[1], alone, tiny_sdxl), run)
    assert run["pipe"].scheduler.config.prediction_type == "v_prediction"
    model = load_published_model(Path(alone.path))
    assert model.weights.drawing(tmp_path).parts == {"scheduler": f"{alone.path}/scheduler"}
    recipe = digits(tmp_path, tiny_sdxl)
    job = smoke_test.describe(Path(alone.path), Base.open(tiny_sdxl), *drawn_by(recipe))
    smoke_test.draw(job)
    Path(alone.path, name).unlink()
    with pytest.raises(OSError, match=r"scheduler_config\.json"):
        smoke_test.draw(job)


def test_the_card_of_adapters_loads_a_base_of_the_variant_fp16(
    tmp_path: Path, tiny_sdxl: Path
) -> None:
    base = tmp_path / "base"
    pipe = StableDiffusionXLPipeline.from_pretrained(tiny_sdxl, torch_dtype=torch.float16)
    pipe.save_pretrained(base, variant="fp16")
    alone = publish(tmp_path, digits(tmp_path, base))
    code = re.search(r"```python\n(.*?)```", alone.read("README.md").decode(), re.DOTALL)
    assert code and "variant='fp16'" in code[1]
    exec(here(code[1], alone, base))


def test_only_weights_count_as_trained_content(tmp_path: Path, tiny_sdxl: Path) -> None:
    trained = train(tmp_path, digits(tmp_path, tiny_sdxl))
    assert [entry["path"] for entry in weights_content(trained)] == [LORA_WEIGHTS]
    with local_weights(trained) as tuned:
        assert tuned.drawing(tmp_path).lora == f"{trained.path}/{LORA_WEIGHTS}" and not tuned.parts


def test_adapters_pass_the_smoke_test_on_a_base_with_text_encoders_in_half_precision(
    tmp_path: Path, tiny_sdxl: Path
) -> None:
    half = tmp_path / "half"
    shutil.copytree(tiny_sdxl, half)
    for file in half.glob("text_encoder*/config.json"):
        config = json.loads(file.read_text(encoding="utf-8")) | {"dtype": "float16"}
        file.write_text(json.dumps(config), encoding="utf-8")
    recipe = digits(tmp_path, tiny_sdxl)
    version = registry_of(recipe).publish(publish(tmp_path, recipe))
    smoke_test.draw(smoke_test.describe(Path(version.uri), Base.open(half), *drawn_by(recipe)))


def test_adapters_pass_the_smoke_test_on_a_base_with_fp16_files_and_the_recipes_vae(
    tmp_path: Path, tiny_sdxl: Path
) -> None:
    half = tmp_path / "half"
    shutil.copytree(tiny_sdxl, half)
    for part in ("unet", "text_encoder", "text_encoder_2"):
        (file,) = (half / part).glob("*.safetensors")
        tensors = {name: tensor.half() for name, tensor in load_file(file).items()}
        save_file(tensors, file.with_suffix(".fp16.safetensors"), {"format": "pt"})
        file.unlink()
    (tmp_path / "other").mkdir()
    vae = (half / "vae").rename(tmp_path / "other/half")  # of the base's name
    recipe = digits(tmp_path, half, **{"model.vae": str(vae)})
    version = registry_of(recipe).publish(publish(tmp_path, recipe, vae))
    smoke_test.draw(smoke_test.describe(Path(version.uri), Base.open(half, vae), *drawn_by(recipe)))


def test_the_card_draws_with_the_vae_of_a_pipeline(tmp_path: Path, tiny_sdxl: Path) -> None:
    """The prompt is the base's path, which is no place there."""
    vaes = tmp_path / "other"
    shutil.copytree(tiny_sdxl / "vae", vaes / "vae")
    changed = {"model.vae": str(vaes), "evaluate.prompts.new.prompts": ["path/to/tiny"]}
    base = Path(shutil.copytree(tiny_sdxl, tmp_path / "tiny"))
    recipe = digits(tmp_path, base, **changed)
    version = registry_of(recipe).publish(publish(tmp_path, recipe, vaes / "vae"))
    card = Path(version.uri, "README.md").read_text(encoding="utf-8")
    assert ".from_pretrained('path/to/vae/other', subfolder=\"vae\", torch_dtype=" in card
    job = smoke_test.describe(Path(version.uri), Base.open(base, vaes / "vae"), *drawn_by(recipe))
    smoke_test.draw(job)
    assert "pipe(prompt='path/to/tiny'" in ast.unparse(smoke_test.card_code(job)[-1])


@pytest.mark.parametrize(
    ("place", "folder", "is_part"),
    [
        ("owner/pipe", "snapshots/abc/vae", True),
        ("owner/vae", "snapshots/abc", False),
        ("{}/pipe", "pipe/vae", True),
        ("{}/pipe/vae", "pipe/vae", False),
    ],
)
def test_a_vae_in_a_pipeline_is_known_by_the_place_of_the_recipe(
    tmp_path: Path, place: str, folder: str, is_part: bool
) -> None:
    (tmp_path / "pipe/vae").mkdir(parents=True)
    assert has_vae_folder(place.format(tmp_path), tmp_path / folder) == is_part
