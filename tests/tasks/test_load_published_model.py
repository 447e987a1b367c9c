"""A published model is loaded only if its files are those that its manifest names."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from store_drafts import flip
from store_servers import UrlOf

from artifacts.models import resolve_model
from artifacts.records import Damaged
from artifacts.store import Artifact, KeyParts, Store
from configs.errors import Refused
from configs.settings.generate import Generate
from tasks import generate
from tasks.evaluate.published import find_parts, is_complete_here, load_published_model
from tasks.publish.registry import Registry

FILES = {
    "README.md": b"a card",
    "model_index.json": b'{"_class_name": "StableDiffusionXLPipeline"}',
    "recipe.yaml": b"{}",
    "unet/diffusion_pytorch_model.safetensors": b"weights",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KILN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def model(url: str) -> Artifact:
    draft = Store(url).draft(KeyParts("publish", 1, {}, {}))
    for path, data in FILES.items():
        draft.write(path, data)
    return draft.commit({}, {})


@pytest.mark.parametrize("path", [name for name in FILES if name != "README.md"])
def test_a_flipped_bit_of_a_published_model_is_an_error_with_a_remedy(
    path: str, tmp_path: Path
) -> None:
    artifact = model(str(tmp_path / "store"))
    registry = Registry(f"{artifact.store.url}/registry", "digits")
    version = registry.promote(registry.publish(artifact).name)
    flip(Path(version.uri, path))
    settings = Generate(model="digits", store=artifact.store.url, prompts=["a"])
    with pytest.raises(Damaged, match=f"{path} is missing or damaged.*kiln verify.*kiln rollback"):
        generate.find_model(settings)
    assert registry.publish(artifact).name == version.name  # which mends it
    assert generate.find_model(settings).base.folder == Path(version.uri)


@pytest.mark.parametrize(
    ("name", "harm"),
    [("unet/diffusion_pytorch_model.safetensors", Path.unlink), ("manifest.json", flip)],
)
def test_a_missing_file_or_a_damaged_manifest_of_a_published_model_is_an_error(
    name: str, harm: Callable[[Path], object], tmp_path: Path
) -> None:
    folder = Path(model(str(tmp_path)).path)
    harm(folder / name)
    with pytest.raises(Damaged, match=f"{Path(name).name} is missing or damaged"):
        load_published_model(folder)


def test_a_damaged_copy_of_a_remote_model_names_the_folder_to_delete(
    url_of: UrlOf, cache: Path
) -> None:
    folder = resolve_model(model(url_of("memory")).uri)
    flip(folder / "unet/diffusion_pytorch_model.safetensors")
    with pytest.raises(Damaged, match=f"delete this copy of the model .{cache}"):
        load_published_model(folder)


def test_a_folder_of_another_program_is_not_checked(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_bytes(FILES["model_index.json"])
    assert load_published_model(tmp_path).base.folder == tmp_path
    (tmp_path / "manifest.json").write_text('{"name": "of a web site"}')
    assert load_published_model(tmp_path).base.folder == tmp_path


def test_an_edited_card_is_no_damage(tmp_path: Path) -> None:
    folder = Path(model(str(tmp_path)).path)
    (folder / "README.md").write_text("other words")
    assert load_published_model(folder).base.folder == folder


@pytest.mark.parametrize("place", ["number", ["base"]])
def test_adapters_whose_recipe_names_no_base_are_explained(tmp_path: Path, place: object) -> None:
    (tmp_path / "pytorch_lora_weights.safetensors").touch()
    recipe = tmp_path / "recipe.yaml"
    with recipe.open("w") as opened:  # its number is that of a file, which is no model
        given = opened.fileno() if place == "number" else place
        recipe.write_text(json.dumps({"model": {"path": given}}))
        assert is_complete_here(tmp_path), "nothing is fetched first"
        with pytest.raises(Refused, match="does not name the base of its adapters"):
            find_parts(tmp_path)


def test_a_base_of_too_long_a_name_is_not_here(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(json.dumps({"model": {"path": "x" * 5000}}))
    assert not is_complete_here(tmp_path)


def test_a_champion_encodes_with_its_trained_text_encoders(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionXLPipeline"}')
    digests = set()
    for trained in (False, True):
        (tmp_path / "recipe.yaml").write_text(
            f"train: {{train_text_encoder: {str(trained).lower()}}}"
        )
        model = load_published_model(tmp_path)
        names = ("text_encoder", "text_encoder_2") if trained else ()
        assert model.weights.parts == {name: tmp_path / name for name in names}
        digests.add(model.digest)
    assert len(digests) == 2  # the losses of one are not to be had for the other's
