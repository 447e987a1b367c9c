"""A store in a bucket, on S3 and GCS: whole runs, resumption, reuse and commands."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gcs_server import GcsServer
from hub_server import HubServer, Repository
from kill_training import kill_training
from kiln_command import ROOT
from published import STAGES, expect, outcomes
from store_servers import S3Server, UrlOf

from artifacts.store import Store

pytestmark = pytest.mark.slow
Here = Callable[..., str]  # of conftest.py, as is the next
RunHere = Callable[..., dict[str, Any]]
Overrides = dict[str, Any]
Report = dict[str, Any]


def on_the_hub(hub: HubServer, folder: Path) -> str:
    """The hub id of a copy of a model."""
    files = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
    contents = {name.as_posix(): path.read_bytes() for name, path in files.items()}
    hub.repositories["some/base"] = Repository(contents)
    return "some/base"


def look_after(here: Here, url: str, report: Report) -> None:
    """The output of `kiln` on a store with one published model, and its deletions."""
    store = Store(url)
    listed = json.loads(here("ls", "--store", url, "--json"))
    assert sorted(row["stage"] for row in listed["artifacts"]) == sorted([*STAGES, "plan"])
    (model,) = listed["models"]
    assert (model["uri"], model["champion"]) == (report["model"], True)
    shown = here("show", f"train/{report['stages']['train']['key']}", "--store", url)
    assert "whole: a run reuses it" in shown and f"at      {url}/train/" in shown
    assert "damaged" not in here("verify", "--store", url)

    trained = f"{store.root}/train/{report['stages']['train']['key']}"
    assert store.fs.find(f"{trained}/checkpoints")
    assert "nothing to delete" in here("gc", "--store", url)  # nothing is a day old
    assert "would be deleted" in here("gc", "--store", url, "--hours", "0")
    here("gc", "--store", url, "--hours", "0", "--delete")
    assert not store.fs.find(f"{trained}/checkpoints")
    assert "damaged" not in here("verify", "--store", url)

    weights = f"{trained}/unet/diffusion_pytorch_model.safetensors"
    whole = store.fs.cat_file(weights)
    store.fs.pipe_file(weights, whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "damaged" in here("verify", "--store", url, code=1)
    store.fs.pipe_file(weights, whole)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["s3", pytest.param("gs", marks=pytest.mark.soak)])
def test_a_run_killed_in_training_resumes_from_the_bucket(
    kind: str,
    url_of: UrlOf,
    hub: HubServer,
    published: Path,
    smallest: Overrides,
    tmp_path: Path,
    here: Here,
    run_here: RunHere,
    api: str,
) -> None:
    url = url_of(kind)
    base = on_the_hub(hub, ROOT / "demo/base")
    overrides = {**smallest, "store": url, "model.path": base}
    kill_training(
        lambda: here("run", "digits", overrides=overrides, code=1, api=api), tmp_path, checkpoint=2
    )
    report = run_here("digits", overrides)
    assert report["status"] == "published"
    assert outcomes(report) == expect("train", "evaluate", "publish")
    store = Store(url)
    trained = store.load("train", report["stages"]["train"]["key"])
    assert trained is not None and trained.manifest["run"]["resumed_from"] == 2

    local = json.loads((published / "report.json").read_bytes())
    weights = "unet/diffusion_pytorch_model.safetensors"
    alone = Path(local["stages"]["train"]["uri"]) / weights
    assert trained.read(weights) == alone.read_bytes()
    assert report["metrics"] == local["metrics"]

    assert report["model"] == f"{url}/registry/digits/v1"
    assert store.fs.cat_file(f"{store.root}/registry/digits/champion") == b"v1"
    assert store.fs.exists(f"{store.root}/registry/digits/v1/report.html")
    assert outcomes(run_here("digits", overrides)) == expect()
    look_after(here, url, report)


@pytest.mark.extended
def test_a_store_moved_to_a_bucket_is_reused(
    url_of: UrlOf, published: Path, smallest: Overrides, here: Here, run_here: RunHere
) -> None:
    url = url_of("gs")
    store = Store(url)
    for stage in STAGES:
        store.fs.put(f"{published}/store/{stage}/", f"{store.root}/{stage}/", recursive=True)
    report = run_here("digits", {**smallest, "store": url})
    assert outcomes(report) == expect()
    assert report["model"] == f"{url}/registry/digits/v1"
    assert store.fs.cat_file(f"{store.root}/registry/digits/champion") == b"v1"
    look_after(here, url, report)


def test_the_error_of_an_unusable_bucket_is_one_line(
    url_of: UrlOf,
    gcs: GcsServer,
    s3_away: None,
    smallest: Overrides,
    here: Here,
    api: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = url_of("s3")
    said = here("ls", "--store", url, code=1)
    assert said.startswith("kiln: the store cannot be used now (Could not connect to the endpoint")
    said = here("ls", "--store", "s3://bucket", code=1)
    assert said.startswith("kiln: the store cannot be used now (Could not connect to the endpoint")
    closed = url_of("gs")
    monkeypatch.setattr(gcs, "forbidden", "^POST ")
    cases = ((url, f"store: {url} cannot be used now", 1), (closed, "no permission for", 2))
    for store, words, code in cases:
        said = here("run", "digits", overrides={**smallest, "store": store}, code=code, api=api)
        assert words in said and len(said.strip().splitlines()) == 1


@pytest.mark.parametrize("command", ["ls", "gc", "verify", "history m"])
def test_the_error_of_a_forbidden_bucket_is_one_line(
    url_of: UrlOf, gcs: GcsServer, here: Here, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    url = url_of("gs")
    Store(url).fs.pipe_file(f"{Store(url).root}/runs/a.json", b"{}")
    monkeypatch.setattr(gcs, "forbidden", ".*")
    said = here(*command.split(), "--store", url, code=1)
    assert said.startswith("kiln: no permission for the store (Forbidden: ")
    assert len(said.strip().splitlines()) == 1


def test_the_error_of_a_misspelt_bucket_is_one_line(
    s3: S3Server, smallest: Overrides, here: Here, api: str
) -> None:
    overrides = {**smallest, "store": "s3://buckte/store"}
    said = here("run", "digits", overrides=overrides, code=2, api=api)
    assert "store s3://buckte/store: its bucket does not exist: correct the name" in said
    assert len(said.strip().splitlines()) == 1
