"""A stage's workers must reach its store and source, and its engine must answer."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shortest_recipe import shortest_recipe

from configs.errors import Refused
from configs.settings.recipe import Recipe
from tasks import download
from tasks.beam.workers import Workers, beam_options, check_workers, workers_of
from tasks.encode.crop_to_bucket import settings_for_key as encode_settings_for_key

DASK = "apache_beam.runners.dask.dask_runner.DaskRunner"


@pytest.fixture
def address() -> Iterator[str]:
    """host:port of a listening socket."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def recipe(**settings: Any) -> Recipe:
    base, source = {"path": "/models/base"}, {"kind": "urls", "path": "urls.parquet"}
    given = {"model": base, "store": "gs://bucket/store", "source": source, **settings}
    return shortest_recipe(**given)


@pytest.mark.parametrize(
    ("options", "workers"),
    [
        ({}, Workers.THREADS),
        ({"direct_running_mode": "multi_threading"}, Workers.THREADS),
        ({"direct_running_mode": "multi_processing"}, Workers.PROCESSES),
        ({"runner": "DirectRunner"}, Workers.PROCESSES),
        ({"runner": "DaskRunner"}, Workers.PROCESSES),
        ({"runner": DASK, "dask_client_address": "tcp://127.0.0.1:8786"}, Workers.REMOTE),
        ({"runner": DASK, "dask_scheduler_file": "/mnt/dask.json"}, Workers.REMOTE),
        ({"runner": "PortableRunner", "environment_type": "LOOPBACK"}, Workers.PROCESSES),
        ({"runner": "PortableRunner", "environment_type": "EXTERNAL"}, Workers.REMOTE),
        ({"runner": "flink"}, Workers.REMOTE),
        ({"runner": "DataflowRunner"}, Workers.REMOTE),
        ({"runner": "their.own.Engine"}, Workers.REMOTE),
    ],
)
def test_an_engine_with_an_address_has_remote_workers(
    options: dict[str, Any], workers: Workers
) -> None:
    assert workers_of(options) is workers


def test_options_of_a_stage_override_those_of_both() -> None:
    both = {"runner": "DaskRunner", "dask_npartitions": 4}
    settings = recipe(beam=both, encode={"beam": {"dask_npartitions": 2}})
    assert beam_options(settings, "download") == both
    assert beam_options(settings, "encode") == {"runner": "DaskRunner", "dask_npartitions": 2}


def test_an_option_that_is_null_is_the_default() -> None:
    """Beam's own default runner is another one, and knows no options of Dask."""
    both = {"runner": "DaskRunner", "dask_npartitions": 4}
    settings = recipe(beam=both, encode={"beam": dict.fromkeys(both)})
    assert beam_options(settings, "download") == both
    assert beam_options(settings, "encode") == {}


def test_an_engine_changes_no_key() -> None:
    dask = {"beam": {"runner": "DaskRunner"}}
    plain, other = recipe(), recipe(**dask, download=dask, encode=dask, shared_folders=["/nfs"])
    assert other.download.beam == other.encode.beam == dask["beam"]
    assert download.settings_for_key(other) == download.settings_for_key(plain)
    assert encode_settings_for_key(other) == encode_settings_for_key(plain)


REMOTE = {"runner": "DataflowRunner"}
FOLDER = {"kind": "folder", "path": "/data/pictures"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"store": "/data/store"}, "store: the workers of DataflowRunner .* shared_folders"),
        ({"store": "file:///data/store"}, "store: .* a folder of this machine"),
        ({"store": "memory://store"}, "store: .* the memory of this process"),
        ({"source": FOLDER}, "source.path: .* cannot reach /data/pictures"),
        ({"source": {**FOLDER, "kind": "dataset"}}, "source.path: .* a folder of this machine"),
        ({"source": FOLDER, "shared_folders": ["/data/pict"]}, "source.path"),
        # of one folder and a name, as the hub's ids
        ({"source": {"kind": "tars", "path": "data/{0..9}.tar"}}, "source.path: .* a folder of th"),
        ({"source": {"kind": "digits"}}, "source.kind: .* an address of this machine alone"),
        (
            {"source": {"kind": "urls", "path": "u.parquet", "base_url": "http://localhost:80"}},
            "source.base_url",
        ),
    ],
)
def test_places_that_remote_workers_cannot_reach_are_refused(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(Refused, match=words):
        check_workers(recipe(beam=REMOTE, **settings), ["download"])
    with pytest.raises(Refused, match=words):
        check_workers(recipe(download={"beam": REMOTE}, **settings), ["download", "encode"])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"source": {"kind": "urls", "path": "/lists/urls.parquet"}},  # only the flow reads it
        {"source": FOLDER, "store": "/data/store", "shared_folders": ["/data"]},
        {"source": {**FOLDER, "path": "s3://bucket/pictures"}},
        {"source": {"kind": "dataset", "path": "owner/name"}},
    ],
)
def test_places_that_remote_workers_reach_are_accepted(settings: dict[str, Any]) -> None:
    check_workers(recipe(beam=REMOTE, **settings), ["download", "encode"])


def test_only_the_stages_of_the_run_are_checked() -> None:
    settings = recipe(store="/data/store", encode={"beam": REMOTE})
    check_workers(settings, ["download"])
    with pytest.raises(Refused, match=r"DataflowRunner \(encode\)"):
        check_workers(settings, ["download", "encode"])


def test_processes_of_this_machine_reach_folders_but_not_memory(tmp_path: Path) -> None:
    beam = {"direct_running_mode": "multi_processing"}
    check_workers(recipe(beam=beam, store=str(tmp_path), source={"kind": "digits"}), ["download"])
    with pytest.raises(Refused, match="the memory of this process"):
        check_workers(recipe(beam=beam, store="memory://store"), ["encode"])


@pytest.mark.parametrize(
    ("runner", "name", "prefix"),
    [("DaskRunner", "dask_client_address", "tcp://"), ("PortableRunner", "job_endpoint", "")],
)
def test_an_engine_that_does_not_answer_is_refused(
    address: str, runner: str, name: str, prefix: str
) -> None:
    check_workers(recipe(beam={"runner": runner, name: f"{prefix}{address}"}), ["encode"])
    with pytest.raises(Refused, match=rf"beam\.{name}: nothing answers at {prefix}127"):
        check_workers(recipe(beam={"runner": runner, name: f"{prefix}127.0.0.1:1"}), ["encode"])
