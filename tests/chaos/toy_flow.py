"""The five stages and `generate`, without models: the store's real code, on a few kilobytes."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
from fsspec.core import url_to_fs

from artifacts.gc import record_run
from artifacts.lock import check_held
from artifacts.records import FileEntry, digest_json, open_checked, read_record
from artifacts.safetensors import read_arrays, write_arrays, writing
from artifacts.store import Artifact, Draft, KeyParts, Shard, Store
from configs.load_recipe import load_recipe
from configs.settings.recipe import Recipe
from runtimes.pipeline_folder.folder import Base
from runtimes.train.checkpoints import Checkpoints
from tasks.build_or_reuse import StageResult, build_or_reuse
from tasks.evaluate.distances import Estimate, Estimates, to_npz
from tasks.evaluate.published import PublishedMetrics
from tasks.evaluate.stage import metrics_by_name
from tasks.publish import stage as publish_stage
from tasks.publish.register import register
from tasks.publish.registry import Registry

NAME = "chaos"
GATE = "score >= champion * 0.5"
WEIGHTS = "unet/diffusion_pytorch_model.safetensors"
STEPS = 4
#: Stages whose bytes are a function of the recipe alone; `publish` depends on the champion.
EXACT = ("download", "encode", "train", "evaluate")


@dataclass(frozen=True)
class ToyRecipe:
    """A recipe; those of one `source` share images, those of one `crop` latents as well."""

    source: int
    crop: int
    seed: int


def run(url: str, toy: ToyRecipe, run_id: str, base: Base) -> dict[str, StageResult]:
    """All stages, as the flow calls them; a model that the gate rejects has no `publish`."""
    store = Store(url)
    found: dict[str, StageResult] = {}
    facts: dict[str, Any] = {"recipe": vars(toy)}

    def stage(
        parts: KeyParts, build: Callable[[Draft], dict[str, Any]], **parents: Artifact
    ) -> Artifact:
        record_run(store, run_id, {**facts, "stages": {parts.stage: [parts.key]}})
        found[parts.stage] = build_or_reuse(store, parts, build, parents=parents)
        return found[parts.stage].load(store)

    source = {"source": digest_json(toy.source)}
    images = stage(KeyParts("download", 1, {"source": toy.source}, source), partial(_download, toy))
    latents = stage(
        KeyParts("encode", 1, {"crop": toy.crop}, {"images": images.digest}),
        partial(_encode, toy, images),
        images=images,
    )
    inputs = {"latents": latents.digest, "base": digest_json("base")}
    trained = stage(
        KeyParts("train", 1, {"seed": toy.seed}, inputs),
        partial(_train, toy, latents),
        latents=latents,
    )
    evaluated = stage(
        KeyParts("evaluate", 1, {}, {"model": trained.digest}),
        partial(_evaluate, trained),
        model=trained,
    )
    recipe = recipe_of(url)
    lineage = publish_stage.lineage_of(images, latents, trained, evaluated)
    publish = publish_stage.PublishStage(
        recipe, base, trained, evaluated, lineage=lineage, champion_metrics=_metrics_of
    )
    try:
        stage(publish.parts, partial(publish.build, progress=lambda *_: None), **publish.parents)
    except publish_stage.Rejected:
        return found
    shows = dict.fromkeys([*EXACT, "publish"], lambda artifact: [])
    register(recipe, base, store, list(found.values()), shows)
    return found


def generate(url: str, seed: int, run_id: str) -> None:
    """Pictures of the champion's, which is read from the registry."""
    store, champion = Store(url), Registry(f"{url}/registry", NAME).champion()
    if champion is None:
        return
    weights = read_published(champion.uri, WEIGHTS)
    parts = KeyParts("generate", 1, {"seed": seed}, {"model": champion.manifest["digest"]})

    def build(draft: Draft) -> dict[str, Any]:
        for number in range(2):
            with tempfile.NamedTemporaryFile(suffix=".png") as picture:
                picture.write(weights + uuid4().bytes)  # no two processes draw the same
                picture.flush()
                draft.upload(picture.name, f"samples/{number:05d}.png")
        draft.write("pictures.json", json.dumps({"pictures": 2}).encode())
        return {"pictures": 2}

    record_run(store, run_id, {"stages": {"generate": [parts.key]}})
    build_or_reuse(store, parts, build, parents={}).load(store)


@cache
def recipe_of(url: str) -> Recipe:
    """The recipe of the store's registry."""
    changes = {
        "store": url,
        "publish.name": NAME,
        "publish.gate": [GATE],
        "publish.smoke_test": False,
    }
    return load_recipe("digits", changes)


def without_models() -> None:
    """Let `publish` write the trained weights as they are, and a card without a base."""

    def write(_: Any, tuned: Any, out: Path) -> None:
        for name, folder in tuned.parts.items():
            (out / name).mkdir(parents=True)
            for file in folder.iterdir():
                if file.is_file():
                    (out / name / file.name).write_bytes(file.read_bytes())

    publish_stage.PublishStage._write_weights = write  # type: ignore[method-assign]
    publish_stage.model_card = SimpleNamespace(  # type: ignore[assignment]
        base_card=lambda base: {},
        shown_license=lambda recipe, base: "none",
        license_files=lambda base: [],
        UNKNOWN_LICENSE="other",
        write_card=lambda *_, **__: f"# Model {uuid4()}",  # as if each had its date
        training_facts=lambda run, summary, settings: {},
        Weights=SimpleNamespace(of=lambda *_, **__: None),
    )


def score(weights: bytes) -> float:
    """What the gate compares: as good as random."""
    return int.from_bytes(hashlib.sha256(weights).digest()[:4], "big") / 2**32


def read_published(uri: str, path: str) -> bytes:
    """A file of a published version. Raises Damaged."""
    fs, root = url_to_fs(uri)
    manifest = read_record(fs, f"{root}/manifest.json")
    assert manifest is not None, f"{uri} has no manifest"
    (sha256,) = (entry.sha256 for entry in manifest["files"] if entry.path == path)
    with open_checked(f"{uri}/{path}", sha256) as stream:
        return bytes(stream.read())


def load_weights(uri: str) -> dict[str, Any]:
    """The arrays of a published version. Raises ValueError if they cannot be loaded."""
    fs, root = url_to_fs(uri)
    return {name: array[...] for name, array in read_arrays(fs, f"{root}/{WEIGHTS}").items()}


def _download(toy: ToyRecipe, draft: Draft) -> dict[str, Any]:
    for part in range(3):  # neighbouring sources share two of three shards
        content = {"rows": toy.source + part}
        draft.add_shard(_shard(draft.store, "download", content, ".tar", _bytes(content, 40_000)))
    draft.write("notes.json", json.dumps({"source": toy.source}).encode())
    return {"shards": 3}


def _encode(toy: ToyRecipe, images: Artifact, draft: Draft) -> dict[str, Any]:
    for entry in images.files:
        if entry.path.endswith(".tar"):
            content = {"crop": toy.crop, "images": entry.sha256}
            data = _bytes({**content, "data": _read(images, entry)}, 20_000)
            draft.add_shard(_shard(draft.store, "encode", content, ".safetensors", data))
    draft.write("info.json", json.dumps({"crop": toy.crop}).encode())
    return {"shards": 3}


def _shard(store: Store, stage: str, content: Any, suffix: str, data: bytes) -> Shard:
    check_held()
    key = digest_json([stage, content])
    if (found := store.shard(stage, key)) is not None:
        return found
    with tempfile.NamedTemporaryFile() as local:
        local.write(data)
        local.flush()
        return store.commit_shard(stage, key, {suffix: local.name}, {"rows": 1})


def _train(toy: ToyRecipe, latents: Artifact, draft: Draft) -> dict[str, Any]:
    """A checkpoint after each step; the process may end at any of them, and the next resumes."""
    checkpoints = Checkpoints(draft.uri, keep=2)
    data = [_read(latents, e) for e in latents.files if e.path.endswith(".safetensors")]
    begin = np.frombuffer(_bytes([toy.seed, data], 8192), np.uint8).astype(np.float32)
    last = checkpoints.latest()
    weights = begin if last is None else last.state["weights"]["w"][...]
    history = [] if last is None else last.history
    resumed_from = len(history)
    for step in range(len(history), STEPS):
        check_held()
        weights = weights * np.float32(0.5) + np.roll(begin, step)
        history.append(json.dumps({"step": step, "loss": float(weights.mean())}))
        checkpoints.save(step + 1, {"weights": {"w": weights}}, history, {"seed": toy.seed})
    check_held()
    files: list[FileEntry] = []
    fs = draft.store.fs
    with writing(fs, draft.path, WEIGHTS, files) as sink:
        write_arrays(sink, {"w": weights})
    with writing(fs, draft.path, "history.jsonl", files) as sink:
        sink.write("".join(f"{line}\n" for line in history).encode())
    for entry in files:
        draft.add(entry)
    draft.write("unet/config.json", b'{"_class_name": "Toy"}')
    return {"steps": STEPS, "run": {"resumed_from": resumed_from}}


def _evaluate(trained: Artifact, draft: Draft) -> dict[str, Any]:
    (entry,) = (entry for entry in trained.files if entry.path == WEIGHTS)
    value = score(_read(trained, entry))
    models = {"tuned": _estimates(value)}
    metrics = metrics_by_name(models)
    draft.write("metrics.json", json.dumps({"metrics": metrics}).encode())
    draft.write("bootstrap.npz", to_npz(models))
    draft.write("before_after.png", _bytes(value, 5_000))
    return {"metrics": metrics}


def _metrics_of(uri: str) -> PublishedMetrics:
    """The metrics of a published version, measured again, which is no artifact here."""
    return _estimates(score(read_published(uri, WEIGHTS))), None


def _estimates(value: float) -> Estimates:
    return {"score": Estimate(value, 1, np.full(2, value))}


def _read(artifact: Artifact, entry: FileEntry) -> bytes:
    with open_checked(artifact.url(entry.path), entry.sha256) as stream:
        return bytes(stream.read())


def _bytes(content: Any, size: int) -> bytes:
    """Bytes that are a function of `content`."""
    seed = int.from_bytes(hashlib.sha256(repr(content).encode()).digest()[:8], "big")
    return np.random.Generator(np.random.PCG64(seed)).bytes(size)
