"""A published model loads in diffusers, has its lineage and passed the gate."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel
from safetensors.torch import load_file

from artifacts.artifact_key import KeyParts
from artifacts.store import Artifact, Store
from configs.load import load_recipe
from configs.recipe import Recipe
from tasks.publish.assemble_pipeline import assemble, cast
from tasks.publish.model_card import base_card, license_of
from tasks.publish.stage import Rejected, build, registry_of, show
from tasks.train import STAGE as TRAIN

METRICS = {
    "cmmd": {
        "base": {"value": 5.0, "n": 10, "ci": [4.0, 6.0]},
        "tuned": {"value": 1.0, "n": 10, "ci": [0.5, 1.5]},
    }
}


@pytest.fixture
def tuned(tiny_sdxl: Path, tmp_path: Path) -> Path:
    """A UNet folder that differs from the base's in every weight."""
    unet = UNet2DConditionModel.from_pretrained(tiny_sdxl / "unet")
    with torch.no_grad():
        for weight in unet.parameters():
            weight.add_(0.5)
    unet.save_pretrained(tmp_path / "tuned")
    return tmp_path / "tuned"


def commit(store: Store, stage: str, files: dict[str, bytes]) -> Artifact:
    draft = store.draft(KeyParts(stage, 1, {}, {}))
    for path, data in files.items():
        draft.write(path, data)
    return draft.commit({}, {"parents": {}})


def publish(tmp_path: Path, base: Path, unet: Path, recipe: Recipe, **more: Any) -> Artifact:
    store = Store(recipe.store)
    trained = commit(store, TRAIN, {f"unet/{p.name}": p.read_bytes() for p in unet.iterdir()})
    measured = json.dumps({"metrics": METRICS, "fingerprint": "f"}).encode()
    evaluated = commit(store, "evaluate", {"metrics.json": measured, "before_after.png": b"png"})
    draft = store.draft(KeyParts("publish", 1, {}, {}))
    champion = more.get("champion_metrics", lambda url: {})
    lineage = {"images": "abc"}
    summary = build(
        recipe, trained, evaluated, lineage, base, None, champion, draft, lambda *a: None
    )
    return draft.commit(summary, {"parents": {}})


def digits(tmp_path: Path, *rules: str) -> Recipe:
    return load_recipe("digits", {"store": str(tmp_path / "store"), "publish.gate": list(rules)})


def test_the_published_folder_loads_with_the_tuned_unet(
    tmp_path: Path, tiny_sdxl: Path, tuned: Path
) -> None:
    artifact = publish(tmp_path, tiny_sdxl, tuned, digits(tmp_path, "cmmd < base"))
    version = registry_of(digits(tmp_path)).publish(artifact)
    pipe = StableDiffusionXLPipeline.from_pretrained(version.uri, torch_dtype=torch.float32)
    want = load_file(tuned / "diffusion_pytorch_model.safetensors")
    for name, weight in pipe.unet.state_dict().items():
        assert torch.equal(weight, want[name].half().float()), name
    stored = load_file(Path(version.uri) / "vae/diffusion_pytorch_model.safetensors")
    assert {w.dtype for w in stored.values()} == {torch.float16}
    assert {panel.title for panel in show(artifact)} >= {"Gate", "Model"}


def test_the_code_of_the_card_runs(tmp_path: Path, tiny_sdxl: Path, tuned: Path) -> None:
    artifact = publish(tmp_path, tiny_sdxl, tuned, digits(tmp_path))
    code = re.search(r"```python\n(.*?)```", artifact.read("README.md").decode(), re.DOTALL)
    assert code
    text = code[1].replace("path/to/this/folder", artifact.path)
    exec(text.replace("num_inference_steps=20", "num_inference_steps=1"))


def test_a_rule_that_fails_publishes_nothing(tmp_path: Path, tiny_sdxl: Path, tuned: Path) -> None:
    recipe = digits(tmp_path, "cmmd < base", "cmmd < base * 0.1")
    with pytest.raises(Rejected, match=r"cmmd < base \* 0\.1 \(measured 1, bound 0\.5\)"):
        publish(tmp_path, tiny_sdxl, tuned, recipe)
    assert not list(Path(recipe.store).glob("publish/*/manifest.json"))


def test_the_champion_is_measured_only_if_a_rule_names_it(
    tmp_path: Path, tiny_sdxl: Path, tuned: Path
) -> None:
    recipe = digits(tmp_path, "cmmd <= champion")
    registry = registry_of(recipe)
    registry.promote(registry.publish(publish(tmp_path, tiny_sdxl, tuned, recipe)).name)
    asked: list[str] = []

    def better(url: str) -> dict[str, Any]:
        asked.append(url.rpartition("/")[2])
        return {"cmmd": {"tuned": {"value": 0.5, "n": 1, "ci": [0, 1]}}}

    with pytest.raises(Rejected):
        publish(tmp_path, tiny_sdxl, tuned, recipe, champion_metrics=better)
    publish(tmp_path, tiny_sdxl, tuned, digits(tmp_path, "cmmd < 2"), champion_metrics=better)
    assert asked == ["v1"]


def test_the_card_has_the_bases_licence(tmp_path: Path, tiny_sdxl: Path, tuned: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_sdxl, base)
    (base / "README.md").write_text("---\nlicense: openrail++\n---\n# Base\n", encoding="utf-8")
    artifact = publish(tmp_path, base, tuned, digits(tmp_path))
    card = artifact.read("README.md").decode()
    assert base_card(Path(artifact.path))["license"] == "openrail++"
    assert "| cmmd | 5 [4, 6] | 1 [0.5, 1.5] | 10 |" in card.replace("\\", "")
    assert "`abc`" in card
    assert license_of(digits(tmp_path), tiny_sdxl) == "other"


def test_a_part_without_weights_is_named(tmp_path: Path, tiny_sdxl: Path, tuned: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_sdxl, base)
    (base / "vae/diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="vae has no"):
        assemble(base, {"unet": tuned}, tmp_path / "out", dtype="float16")


def test_the_error_of_an_overflowing_weight_names_it() -> None:
    large = torch.tensor([1.0, 1e5])
    with pytest.raises(OverflowError, match=r"unet\.x does not fit float16: .*bfloat16"):
        cast("unet.x", large, "float16")
    assert cast("unet.x", large, "bfloat16").isfinite().all()
    endless = torch.tensor([float("inf")])  # it was none before
    assert cast("unet.x", endless, "float16").isinf().all()
