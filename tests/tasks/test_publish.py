"""A published model loads in diffusers, has its lineage and passed the gate."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel
from safetensors.torch import load_file
from store_drafts import commit
from toy_recipes import digits, drawn_by

from artifacts.store import Artifact, Store
from configs.errors import Away, Refused
from configs.load_recipe import load_recipe
from configs.settings.recipe import Recipe
from runtimes.pipeline_folder.folder import Base
from tasks.evaluate.distances import Estimate, Estimates, to_npz
from tasks.evaluate.published import PublishedMetrics
from tasks.evaluate.stage import metrics_by_name
from tasks.publish import smoke_test
from tasks.publish.assemble import assemble, cast
from tasks.publish.model_card import (
    base_card,
    license_conflict,
    license_files,
    license_of,
    shown_license,
)
from tasks.publish.stage import PublishStage, Rejected, _compared, registry_of, settings_for_key
from tasks.train import STAGE as TRAIN

pytestmark = pytest.mark.slow
Publish = Callable[..., Artifact]
MODELS = {
    "base": {"cmmd": Estimate(5.0, 10, np.linspace(4.0, 6.0, 401))},
    "tuned": {"cmmd": Estimate(1.0, 10, np.linspace(0.5, 1.5, 401))},
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


def published(base: Path, unet: Path, recipe: Recipe, **more: Any) -> Artifact:
    store = Store(recipe.store)
    trained = commit(store, TRAIN, {f"unet/{p.name}": p.read_bytes() for p in unet.iterdir()})
    facts = {"metrics": metrics_by_name(MODELS), "fingerprint": "f"}
    files = {
        "metrics.json": json.dumps(facts).encode(),
        "bootstrap.npz": to_npz(MODELS),
        "before_after.png": more.get("picture", b"png"),
    }
    evaluated = commit(store, "evaluate", files, pictures=10)
    opened = Base.open(base, more.get("vae"))
    metrics = more.get("champion_metrics", lambda url: {})

    def champion(url: str) -> PublishedMetrics:
        return PublishedMetrics(metrics(url))

    about = (recipe, opened, trained, evaluated, more.get("force"))
    stage = PublishStage(*about, {"images": "abc"}, champion)
    draft = store.draft(stage.parts)
    more.get("before_build", lambda: None)()
    summary = stage.build(draft, more.get("progress", lambda *a: None))
    assert summary.pop("parents") == {}, "the champion was not measured again"
    return draft.commit(summary, {"parents": {}})


@pytest.fixture
def publish(tiny_sdxl: Path, tuned: Path) -> Publish:
    """`publish(recipe, **more)` publishes the tuned UNet, of another `base` if one is given."""
    return lambda recipe, base=tiny_sdxl, **more: published(base, tuned, recipe, **more)


def promote(recipe: Recipe, artifact: Artifact) -> None:
    registry = registry_of(recipe)
    registry.promote(registry.publish(artifact).name)


def test_the_published_folder_loads_with_the_tuned_unet(
    publish: Publish, tmp_path: Path, tuned: Path
) -> None:
    artifact = publish(digits(tmp_path, "cmmd < base"))
    version = registry_of(digits(tmp_path)).publish(artifact)
    pipe = StableDiffusionXLPipeline.from_pretrained(version.uri, torch_dtype=torch.float32)
    want = load_file(tuned / "diffusion_pytorch_model.safetensors")
    for name, weight in pipe.unet.state_dict().items():
        assert torch.equal(weight, want[name].half().float()), name
    stored = load_file(Path(version.uri) / "vae/diffusion_pytorch_model.safetensors")
    assert {w.dtype for w in stored.values()} == {torch.float16}
    assert {panel.title for panel in PublishStage.show(artifact)} >= {"Gate", "Model"}


def test_the_code_of_the_card_runs(publish: Publish, tmp_path: Path) -> None:
    artifact = publish(digits(tmp_path))
    code = re.search(r"```python\n(.*?)```", artifact.read("README.md").decode(), re.DOTALL)
    assert code
    text = code[1].replace("path/to/this/folder", artifact.path)
    exec(text.replace("num_inference_steps=20", "num_inference_steps=1"))


def test_a_rule_that_fails_publishes_nothing(publish: Publish, tmp_path: Path) -> None:
    recipe = digits(tmp_path, "cmmd < base", "cmmd < base * 0.1")
    with pytest.raises(Rejected, match=r"cmmd < base \* 0\.1 \(measured 1, bound 0\.5\)"):
        publish(recipe)
    assert not list(Path(recipe.store).glob("publish/*/manifest.json"))


def test_the_champion_is_measured_only_if_a_rule_names_it(publish: Publish, tmp_path: Path) -> None:
    recipe = digits(tmp_path, "cmmd <= champion")
    other = publish(recipe, picture=b"another model's")
    promote(recipe, other)
    asked: list[str] = []

    def better(url: str) -> Estimates:
        asked.append(url.rpartition("/")[2])
        return {"cmmd": Estimate(0.5, 10, np.linspace(0.4, 0.6, 401))}

    with pytest.raises(Rejected):
        publish(recipe, champion_metrics=better)
    publish(digits(tmp_path, "cmmd < 2"), champion_metrics=better)
    assert asked == ["v1"]


@pytest.mark.parametrize("others", [("base", "champion"), ("champion", "base")])
def test_the_order_of_compared_models_does_not_depend_on_the_process(
    others: tuple[str, str],
) -> None:
    """A rebuilt artifact has the same bytes."""
    found = {"cmmd": Estimate(2.0, 10, np.linspace(1.5, 2.5, 401))}
    compared = _compared({"tuned": found, **dict.fromkeys(others, found)})
    assert tuple(compared["differences"]["cmmd"]) == others


def test_a_champion_with_other_settings_is_compared_with_the_one_before_it(
    publish: Publish, tmp_path: Path
) -> None:
    """A model that must be better than itself could not be published as bfloat16."""
    asked: list[str] = []

    def worse(url: str) -> Estimates:
        asked.append(url.rpartition("/")[2])
        return {"cmmd": Estimate(2.0, 10, np.linspace(1.5, 2.5, 401))}

    recipe = digits(tmp_path, "cmmd < champion at 95%")
    promote(recipe, publish(recipe, picture=b"another model's"))
    given = {"champion_metrics": worse}
    promote(recipe, publish(recipe, **given))
    halved = digits(tmp_path, "cmmd < champion at 95%", dtype="bfloat16")
    artifact = publish(halved, **given)
    assert artifact.summary["compared_with"] == "v1" and asked == ["v1", "v1"]
    first = registry_of(recipe).version("v1")
    assert artifact.manifest["inputs"]["champion"] == first.manifest["digest"]


@pytest.mark.parametrize("compared", [False, True], ids=["as the first", "with a champion"])
def test_an_earlier_champion_is_not_published_again(
    publish: Publish, tmp_path: Path, compared: bool
) -> None:
    """Its key names the champion that it was compared with, as when it was published."""
    recipe = digits(tmp_path, "cmmd <= champion")
    worse = {"champion_metrics": lambda url: {"cmmd": Estimate(2.0, 10, np.linspace(1, 3, 401))}}

    def crown(picture: bytes) -> Artifact:
        artifact = publish(recipe, picture=picture, **worse)
        promote(recipe, artifact)
        return artifact

    if compared:
        crown(b"before")
    earlier = crown(b"earlier")
    crown(b"later")
    again = publish(recipe, picture=b"earlier", **worse)
    assert again.key == earlier.key
    assert again.summary["compared_with"] == "v1", "the one before; the first: itself"
    other = digits(tmp_path, "cmmd < champion + 1")
    stricter = publish(other, picture=b"earlier", **worse)
    assert stricter.summary["compared_with"] == ("v3" if compared else "v2")


def test_a_champion_that_comes_after_the_key_is_not_judged_under_it(
    publish: Publish, tmp_path: Path
) -> None:
    recipe = digits(tmp_path, "cmmd <= champion")
    other = publish(recipe, picture=b"another model's")
    with pytest.raises(Away, match="another model became the champion meanwhile"):
        publish(recipe, before_build=lambda: promote(recipe, other))


def test_what_is_published_has_the_champions_metrics_and_the_paired_difference(
    publish: Publish, tmp_path: Path
) -> None:
    recipe = digits(tmp_path, "cmmd < champion + 1 at 95%")
    other = publish(recipe, picture=b"another model's")
    promote(recipe, other)
    champion = {"cmmd": Estimate(0.8, 10, np.linspace(0.3, 1.3, 401))}
    artifact = publish(recipe, champion_metrics=lambda url: champion)
    measured = json.loads(artifact.read("metrics.json"))
    assert measured["metrics"]["cmmd"]["champion"]["value"] == 0.8
    assert measured["differences"]["cmmd"]["champion"]["ci"] == pytest.approx([0.2, 0.2])
    (verdict,) = json.loads(artifact.read("gate.json"))
    assert verdict["bound"] == pytest.approx(1.8)
    assert verdict["interval"] == pytest.approx([-0.8, -0.8])
    assert "tuned - champion" in artifact.read("README.md").decode().replace("\\", "")


def test_a_model_that_is_undecided_at_a_level_is_told_the_interval(
    publish: Publish, tmp_path: Path
) -> None:
    """Its value may be below the bound."""
    recipe = digits(tmp_path, "cmmd < 1.35 at 95%")
    said = (
        r"not enough pictures to tell: cmmd < 1\.35 at 95% "
        r"\(measured 1, bound 1\.35, value - bound in \[-0\.\d+, 0\.\d+\]: "
        r"about \d+ more pictures would do \(evaluate\.max_pictures\)\)"
    )
    with pytest.raises(Rejected, match=said):
        publish(recipe)


def test_the_published_intervals_stay_in_the_range_of_their_metric(
    publish: Publish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are computed again from the evaluation's resampled values."""
    near_0 = Estimate(0.1, 10, np.linspace(-0.4, 0.6, 401), low=0.0)
    monkeypatch.setitem(MODELS["tuned"], "cmmd", near_0)
    artifact = publish(digits(tmp_path))
    published = json.loads(artifact.read("metrics.json"))["metrics"]["cmmd"]["tuned"]
    assert published["ci"] == pytest.approx(near_0.metric()["ci"]) and published["ci"][0] == 0.0


def test_a_forced_model_names_the_reason_in_card_and_history(
    publish: Publish, tmp_path: Path
) -> None:
    recipe, reason = digits(tmp_path, "cmmd < 0.5"), "the old one leaks"
    told: list[str] = []

    def progress(done: int, total: int, text: str = "") -> None:
        told.append(text)

    artifact = publish(recipe, force=reason, progress=progress)
    assert f"gate failed (cmmd < 0.5), forced: {reason}" in told
    assert artifact.summary["forced"] == reason
    card = artifact.read("README.md").decode()
    assert f"**Published in spite of a failed gate:** {reason}" in card and "failed" in card
    assert settings_for_key(recipe, reason) != settings_for_key(recipe)
    passes = publish(digits(tmp_path, "cmmd < base"), force=reason)
    assert passes.summary["forced"] is None and reason not in passes.read("README.md").decode()


def test_adapters_of_a_base_that_was_moved_are_published_again(tmp_path: Path) -> None:
    def settings(place: str, *, merge: bool = False, vae: str | None = None) -> dict[str, Any]:
        given = {"model.path": str(tmp_path / place), "model.vae": vae, "publish.merge": merge}
        return settings_for_key(load_recipe("digits-lora", given))

    assert settings("a") == settings("a") != settings("b")
    assert settings("a", vae=str(tmp_path / "vae")) != settings("a")
    assert settings("a", merge=True) == settings("b", merge=True), "it has its base's weights"


def test_the_smoke_test_draws_by_plain_diffusers(
    publish: Publish, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kiln")
    artifact = publish(digits(tmp_path, smoke_test=True))
    assert artifact.summary["forced"] is None
    assert "publish: smoke test: diffusers loads the folder" in caplog.text


def test_the_smoke_test_uses_the_recipes_vae(
    publish: Publish, tmp_path: Path, tiny_sdxl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(smoke_test, "drawing_fault", lambda *given: asked.append(given))
    recipe, vae = digits(tmp_path, smoke_test=True), tiny_sdxl / "vae"
    publish(recipe, vae=vae)
    assert [given[1:] for given in asked] == [(Base.open(tiny_sdxl, vae), *drawn_by(recipe))]


def test_a_folder_that_fails_the_smoke_test_is_rejected(
    publish: Publish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smoke_test, "__file__", str(tmp_path / "fails.py"))
    (tmp_path / "fails.py").write_text("raise ValueError('no picture')")
    recipe = digits(tmp_path, "cmmd < base", smoke_test=True)
    with pytest.raises(Rejected, match=r"smoke test \(ValueError: no picture\)") as caught:
        publish(recipe)
    assert [verdict.passed for verdict in caught.value.verdicts] == [True, False]
    assert not list((tmp_path / "store").glob("publish/*/manifest.json"))


def test_files_are_checked_without_the_smoke_test(publish: Publish, tmp_path: Path) -> None:
    recipe = digits(tmp_path, smoke_test=False, max_bytes=99)
    with pytest.raises(Rejected, match=r"exceed publish\.max_bytes"):
        publish(recipe)


def test_a_part_that_is_copied_without_being_read_is_in_the_key(
    tmp_path: Path, tiny_sdxl: Path
) -> None:
    base, store = Path(shutil.copytree(tiny_sdxl, tmp_path / "base")), Store(str(tmp_path / "s"))
    trained, evaluated = commit(store, TRAIN, {"a": b"a"}), commit(store, "evaluate", {"a": b"a"})

    def inputs(**settings: Any) -> dict[str, str]:
        recipe = digits(tmp_path, **settings)
        return PublishStage(recipe, Base.open(base), trained, evaluated).inputs

    plain = inputs()
    index = json.loads((base / "model_index.json").read_text())
    index["feature_extractor"] = ["transformers", "CLIPImageProcessor"]
    (base / "model_index.json").write_text(json.dumps(index))
    found = []
    for resample in (3, 0):
        (base / "feature_extractor").mkdir(exist_ok=True)
        config = base / "feature_extractor/preprocessor_config.json"
        config.write_text(json.dumps({"resample": resample, "size": resample * "x"}))
        found.append(inputs())
    assert found[0] != found[1] and plain.items() < found[0].items()
    lora = {"train.method": "lora", "merge": False}
    assert inputs(**lora) == plain, "adapters alone have no part of the base"


def base_with_card(tiny_sdxl: Path, tmp_path: Path, front_matter: str) -> Path:
    """A copy of the base whose model card opens so."""
    base = Path(shutil.copytree(tiny_sdxl, tmp_path / "base"))
    (base / "README.md").write_text(f"---\n{front_matter}---\n# Base\n", encoding="utf-8")
    return base


#: The front matter of a base whose licence has no identifier.
NAMED = "license: other\nlicense_name: some-non-commercial\nlicense_link: LICENSE.md\n"


def test_the_card_has_the_bases_licence(publish: Publish, tmp_path: Path, tiny_sdxl: Path) -> None:
    base = base_with_card(tiny_sdxl, tmp_path, "license: openrail++\n")
    artifact = publish(digits(tmp_path), base)
    card = artifact.read("README.md").decode()
    assert base_card(Path(artifact.path))["license"] == "openrail++"
    assert (
        "| cmmd | 5 [4.05, 5.95] | 1 [0.525, 1.475] | -4 [-4.475, -3.525] | 10 |"
        in card.replace("\\", "")
    )
    assert "`abc`" in card
    assert license_of(digits(tmp_path).publish, tiny_sdxl) == "other"


def test_a_licence_named_other_is_known_by_its_name_and_comes_with_its_text(
    publish: Publish, tmp_path: Path, tiny_sdxl: Path
) -> None:
    base = base_with_card(tiny_sdxl, tmp_path, NAMED)
    (base / "LICENSE.md").write_text("terms\n", encoding="utf-8")
    recipe = digits(tmp_path)
    assert shown_license(recipe.publish, base) == "some-non-commercial"
    assert shown_license(recipe.publish, tiny_sdxl) == "other"
    artifact = publish(recipe, base)
    assert NAMED in artifact.read("README.md").decode()
    assert artifact.read("LICENSE.md") == b"terms\n"
    card = artifact.read("README.md").decode().replace("\\", "")
    assert "A modified version of the base. Licence: some-non-commercial. " in card
    assert "Texts that came with the base: `LICENSE.md`.\n" in card


def test_an_own_licence_has_neither_name_nor_link_of_the_bases(
    publish: Publish, tmp_path: Path, tiny_sdxl: Path
) -> None:
    base = base_with_card(tiny_sdxl, tmp_path, NAMED)
    for name in ("LICENCE", "License.txt", "NOTICE", "notes.txt"):
        (base / name).write_text("terms\n", encoding="utf-8")
    recipe = digits(tmp_path, license="apache-2.0")
    conflict = license_conflict(recipe.publish, base)
    assert conflict is not None and "apache-2.0 differs from the base's licence, some" in conflict
    assert license_conflict(recipe.publish, tiny_sdxl) is None
    assert license_conflict(digits(tmp_path, license="other").publish, base) is None
    artifact = publish(recipe, base)
    assert base_card(Path(artifact.path)) == {"license": "apache-2.0"}
    copied = {path.name for path in license_files(Path(artifact.path))}
    assert copied == {"LICENCE", "License.txt", "NOTICE"}


def test_a_part_without_weights_is_named(tmp_path: Path, tiny_sdxl: Path, tuned: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_sdxl, base)
    (base / "vae/diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="vae has no"):
        assemble(Base.open(base), {"unet": tuned}, tmp_path / "out", dtype="float16")


def test_the_error_of_an_overflowing_weight_names_it() -> None:
    large = torch.tensor([1.0, 1e5])
    with pytest.raises(Refused, match=r"unet\.x does not fit float16: .*bfloat16"):
        cast("unet.x", large, "float16")
    assert cast("unet.x", large, "bfloat16").isfinite().all()
    endless = torch.tensor([float("inf")])  # it was none before
    assert cast("unet.x", endless, "float16").isinf().all()
