"""Training on a slice: what gcloud is told."""

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from configs.load import RecipeError, load_recipe
from configs.tpu import Tpu
from configs.training import Wandb
from runtimes.base import WrongInput
from tasks.tpu import launch
from tasks.tpu.commands import Slice

SLICE: dict[str, Any] = {"name": "kiln", "zone": "us-east5-a", "accelerator_type": "v5p-16"}


def test_the_commands_name_what_the_recipe_says() -> None:
    tpu = Tpu(**SLICE, project="mine", capacity="spot", queued=True, service_account="a@b")
    there = Slice(tpu)
    assert " ".join(there.create()) == (
        "gcloud compute tpus queued-resources create kiln --zone=us-east5-a --project=mine "
        "--accelerator-type=v5p-16 --runtime-version=v2-alpha-tpuv5 --node-id=kiln --spot "
        "--service-account=a@b"
    )
    assert " ".join(there.delete()) == (
        "gcloud compute tpus queued-resources delete kiln --zone=us-east5-a --project=mine "
        "--force --quiet"
    )
    reserved = Slice(Tpu(**SLICE, capacity="reserved"))
    assert " ".join(reserved.create()) == (
        "gcloud compute tpus tpu-vm create kiln --zone=us-east5-a --accelerator-type=v5p-16 "
        "--version=v2-alpha-tpuv5 --reserved"
    )
    assert reserved.ssh("ls")[-1] == "--command=ls" and "--worker=all" in reserved.ssh("ls")
    assert reserved.copy(Path("job.json"), "home/job.json")[-2:] == [
        "kiln:home/job.json",
        "--worker=all",
    ]


def test_the_code_that_is_sent_is_whole_and_always_the_same() -> None:
    packed = launch._pack()
    assert packed == launch._pack()
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        names = tar.getnames()
    assert {"deploy/tpu/worker.sh", "runtimes/__main__.py", "requirements/xla.txt"} <= set(names)
    assert not [name for name in names if name.startswith(("tests", "flows", "tasks"))]


def test_a_plan_is_in_the_order_of_a_run() -> None:
    words = [why for why, _ in launch.plan(Tpu(**SLICE))]
    assert words[1] == "make it" and words[-1] == "delete it"
    assert "delete it" not in [why for why, _ in launch.plan(Tpu(**SLICE, keep=True))]


def test_a_slice_is_refused_before_work_where_it_could_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gcloud").write_text("")
    (tmp_path / "gcloud").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WrongInput, match="make it a gs:// URL"):
        launch.check(Tpu(**SLICE), "store", None)
    with pytest.raises(WrongInput, match="mode offline"):
        launch.check(Tpu(**SLICE), "gs://bucket/store", Wandb(project="p"))
    launch.check(Tpu(**SLICE), "gs://bucket/store", None)
    (tmp_path / "gcloud").unlink()
    with pytest.raises(WrongInput, match="gcloud is not installed"):
        launch.check(Tpu(**SLICE), "gs://bucket/store", None)
    with pytest.raises(RecipeError, match="tpu is for runtime xla"):
        load_recipe("digits", {f"tpu.{name}": value for name, value in SLICE.items()})
