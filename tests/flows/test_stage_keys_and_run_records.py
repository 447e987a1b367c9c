"""The keys of stages and the records of runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from reused_runs import commit, publishing, reused, run_of_digits

from artifacts.gc import needed_by, runs
from artifacts.latent_shards import INFO, Latents, ShardRef
from artifacts.models import digest_model
from artifacts.store import Artifact, KeyParts, Store
from configs.errors import Failed, Refused
from configs.settings.generate import read_settings
from configs.settings.recipe import Hub
from configs.settings.train_parts import Profile
from flows import finetune, generate
from flows import run as run_module
from flows.run import Run
from tasks import download
from tasks.build_or_reuse import build_or_reuse
from tasks.encode.stage import EncodeStage
from tasks.plan.gpu_memory import with_settings
from tasks.publish import stage as publish
from tasks.train import TrainStage


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return run_of_digits(tmp_path)


class Asked(Exception):
    """The arguments of `build_or_reuse`."""


def test_a_retraining_decides_anew_where_training_takes_other_latents(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run.model_digests()
    monkeypatch.setattr("runtimes.families.sdxl.SDXL.draws_latents", False)
    assert run.model_digests() == {**before, "posterior": "mean"}


def test_a_stages_key_has_all_its_inputs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def note(
        store: Store, parts: KeyParts, build: Any, *, parents: dict[str, Artifact], **_: Any
    ) -> Any:
        raise Asked(parts, parents)

    def asked(task: Any, *arguments: Any) -> tuple[dict[str, str], dict[str, Artifact]]:
        with pytest.raises(Asked) as noted:
            task.fn(*arguments)
        parts, parents = noted.value.args
        assert parts.stage == task.fn.__name__
        return parts.inputs, parents

    monkeypatch.setattr("tasks.build_or_reuse.build_or_reuse", note)
    made = {
        stage: commit(run.store, stage, 1, {"source": "s", "base": "b"})
        for stage in ("download", "encode", "train", "evaluate")
    }
    images, latents, trained, evaluated = made.values()
    inputs, parents = asked(finetune.download, run)
    plan = download.plan(run.recipe)
    assert inputs == {"source": plan.source_digest}
    assert {name: one.uri for name, one in parents.items()} == {"plan": plan.artifact.uri}
    inputs, parents = asked(finetune.encode, run, reused(images))
    assert inputs["images"] == images.digest and "encoders" in inputs
    assert parents == {"images": images}
    ungated = run.recipe.model_copy(update={"publish": _without_gate(run)})
    inputs, parents = asked(finetune.train, replace(run, recipe=ungated), reused(latents))
    base = digest_model(run.base.folder, ("unet", "scheduler"))
    assert inputs == {"latents": latents.digest, "base": base}
    assert parents == {"latents": latents}
    before = [reused(artifact) for artifact in made.values()]
    inputs, parents = asked(finetune.evaluate, run, *before[:3])
    read = {"images", "training_images", "latents", "model", "base", "clip"}
    assert read == inputs.keys()
    assert inputs["model"] == trained.digest and inputs["latents"] == latents.digest
    assert parents == {"images": images, "latents": latents, "model": trained}
    inputs, parents = asked(finetune.publish, run, *before)
    assert inputs["model"] == trained.digest and inputs["evaluation"] == evaluated.digest
    assert parents == {"model": trained, "evaluation": evaluated}


def test_the_alpha_of_a_start_in_pefts_layout_is_in_the_key(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(b"adapters")
    train = with_settings(run.recipe.train, {"method": "lora", "lora.start": str(file)})
    recipe = run.recipe.model_copy(update={"train": train})
    latents = commit(run.store, "encode", 1, {})

    def key() -> str:
        return TrainStage(recipe, latents, run.base, clip=run.measuring.clip).parts.key

    keys = {key()}
    for alpha in (8, 16):
        (tmp_path / "adapter_config.json").write_text(f'{{"lora_alpha": {alpha}}}')
        keys.add(key())
    assert len(keys) == 3


def test_the_limit_of_bad_samples_holds_for_a_reused_encode_too(run: Run) -> None:
    images = commit(run.store, "download", 1, {})
    draft = run.store.draft(EncodeStage(run.recipe, images, run.base).parts)
    draft.write(INFO, b"{}")
    draft.commit({"samples": 8, "holdout": 1, "bad": {"NaN": 2}}, {})
    with pytest.raises(Failed, match="2 of 10 samples are bad"):
        finetune.encode.fn(run, reused(images))


def test_a_run_records_its_stages_before_their_builds(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = commit(run.store, "download", 1, {})
    kept: list[set[str]] = []

    def killed(store: Store, *_: Any, **more: Any) -> Any:
        kept.extend({s for s, _ in run.keys} for run in runs(store))
        raise KeyboardInterrupt

    monkeypatch.setattr("tasks.build_or_reuse.build_or_reuse", killed)
    with pytest.raises(KeyboardInterrupt):
        finetune.download.fn(run)
    with pytest.raises(KeyboardInterrupt):
        finetune.encode.fn(run, reused(images))
    assert kept == [{"plan", "download"}, {"plan", "download", "encode"}]


def test_generate_records_its_run_before_the_build(
    tmp_path: Path, tiny_sdxl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"store": str(tmp_path / "store"), "device": "cpu", "num_inference_steps": 1}
    settings = read_settings(str(tiny_sdxl), ["a cat"], given)
    kept: list[tuple[str, str]] = []

    def drawn(store: Store, parts: KeyParts, build: Any, **_: Any) -> Any:
        kept.extend((key, parts.key) for run in runs(store) for _, key in run.keys)
        raise KeyboardInterrupt

    monkeypatch.setattr("tasks.build_or_reuse.build_or_reuse", drawn)
    with pytest.raises(KeyboardInterrupt):
        generate.draw.fn(settings, "a-run")
    ((recorded, wanted),) = kept
    assert recorded == wanted


def test_an_artifact_names_its_parents(run: Run) -> None:
    store = run.store
    images = commit(store, "download", 1, {})
    parts = KeyParts("encode", 1, {}, {"images": images.digest})
    made = build_or_reuse(store, parts, lambda draft: {}, parents={"images": images})
    needed = needed_by(store, [("encode", made.key)])
    assert needed.keys() == {("encode", made.key), ("download", images.key)}


def test_a_run_records_its_plan_before_it_looks_for_one(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kiln gc` could otherwise delete the plan of last month's run between the two."""
    before, find = run.plan(), Store.find
    run.store.fs.rm(f"{run.store.root}/runs", recursive=True)

    def recorded(store: Store, stage: str, key: str) -> Artifact | None:
        (record,) = runs(store)
        assert (stage, key) in record.keys
        return find(store, stage, key)

    monkeypatch.setattr(Store, "find", recorded)
    assert run.plan() == before


def test_the_epochs_of_each_trial_are_checked_before_a_stage_begins(run: Run) -> None:
    def trial(**settings: Any) -> Any:
        return run.recipe.model_copy(update={"train": run.recipe.train.model_copy(update=settings)})

    fine = trial(epochs=100)
    replace(run, recipe=fine, trials=[fine, trial(epochs=200)]).plan()
    with pytest.raises(Refused, match=r"1e-09 of \d+ rows are less than one step"):
        replace(run, recipe=fine, trials=[fine, trial(epochs=1e-9)]).plan()
    traced = trial(epochs=100, profile=Profile(start=10**6, steps=2))
    with pytest.raises(Refused, match=r"rows are \d+ steps: train\.profile traces steps"):
        replace(run, recipe=traced).plan()


def test_epochs_without_a_step_are_refused_before_a_stage_begins(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = run.recipe.train.model_copy(update={"epochs": 1e-9})
    short = replace(run, recipe=run.recipe.model_copy(update={"train": train}))
    with pytest.raises(Refused, match=r"1e-09 of \d+ rows are less than one step .*: raise"):
        short.plan()
    replace(short, stages=("download", "encode")).plan()
    monkeypatch.setattr(run_module, "plan_changes", lambda *given: given[-1:])
    again = replace(short, champion=cast(Any, "a champion"))
    again.plan()  # from the champion's weights, by steps of its own
    retrain = run.recipe.retrain.model_copy(update={"start": "base"})
    again = replace(again, recipe=short.recipe.model_copy(update={"retrain": retrain}))
    with pytest.raises(Refused, match="rows are less than one step"):
        again.plan()
    few = Latents({}, [ShardRef("", 0, "", {"train/8x8": 9, "holdout/8x8": 2})])
    monkeypatch.setattr(finetune, "open_latents", lambda _: few)
    encoded = commit(run.store, "encode", 1, {})
    with pytest.raises(Failed, match=r"train: .* of 9 training samples are less than"):
        finetune.train.fn(short, reused(encoded))
    assert "train" not in {stage for record in runs(run.store) for stage, _ in record.keys}


def _without_gate(run: Run) -> Any:
    return run.recipe.publish.model_copy(update={"gate": ()})


def test_where_a_model_is_published_does_not_change_its_key(run: Run) -> None:
    elsewhere = publishing(
        run, hub=Hub(repo="a/b"), signing_key="key.pem", keep_versions=3, registry="elsewhere"
    )
    assert publish.settings_for_key(run.recipe) == publish.settings_for_key(elsewhere.recipe)
