"""Options of every documented engine are read as Beam reads its flags; wrong ones are named."""

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from kiln_command import ROOT

from configs.errors import Refused
from tasks.beam.pipeline import make_pipeline


def documented(heading: str) -> dict[str, Any]:
    """The `beam` options in the page on engines, of both stages."""
    page = (ROOT / "docs/engines.md").read_text(encoding="utf-8")
    section = page.split(f"## {heading}\n")[1].split("\n## ")[0]
    found = re.search(r"```yaml\n(.*?)```", section, re.DOTALL)
    assert found is not None
    recipe = yaml.safe_load(found[1])
    return {**recipe["beam"], **recipe.get("encode", {}).get("beam", {})}


def read(options: dict[str, Any]) -> dict[str, Any]:
    return dict(make_pipeline(options).options.get_all_options())


def test_options_have_the_names_and_types_of_beams_flags() -> None:
    found = read(
        {"runner": "DaskRunner", "dask_client_address": "tcp://a:1", "dask_npartitions": 9}
    )
    assert (found["address"], found["npartitions"]) == ("tcp://a:1", 9)


def test_several_workers_of_the_default_runner_are_threads() -> None:
    mode = "direct_running_mode"
    assert read({})[mode] == "in_memory"
    assert read({"direct_num_workers": 3})[mode] == "multi_threading"
    assert read({"direct_num_workers": 3, mode: "multi_processing"})[mode] == "multi_processing"


def test_a_shard_is_a_task_of_dask() -> None:
    assert read({"runner": "DaskRunner"})["partition_size"] == 1
    assert read({"runner": "DaskRunner", "dask_npartitions": 9})["partition_size"] is None


def test_documented_options_of_flink_are_flags_of_its_runner() -> None:
    found = read(documented("Flink and Spark"))
    assert found["environment_type"] == "EXTERNAL"
    assert found["parallelism"] == 16


def test_documented_options_of_dataflow_are_flags_of_beam() -> None:
    options = documented("Dataflow")
    found = read({**options, "runner": "FnApiRunner"})  # Dataflow's asks Google for the bucket
    assert found["sdk_container_image"] == options["sdk_container_image"]
    assert found["dataflow_service_options"] == options["dataflow_service_options"]
    assert found["number_of_worker_harness_threads"] == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"runner": "DaskRunner", "dask_address": "a"}, "mean beam.dask_client_address"),
        ({"runner": "FlinkRunner", "paralellism": 2}, "did you mean beam.parallelism"),
        ({"direct_num_workers": "two"}, "beam: direct_num_workers: invalid int value: 'two'"),
        ({"runner": "FlinkRunner", "flink_version": "1.0"}, "beam: flink_version: invalid choice"),
    ],
)
def test_a_wrong_option_is_named_in_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words) as caught:
        make_pipeline(options)
    assert "\n" not in str(caught.value)


def test_a_pipeline_leaves_no_folder_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    make_pipeline({})
    assert not list(tmp_path.iterdir())
