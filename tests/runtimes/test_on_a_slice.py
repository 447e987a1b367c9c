"""A train job on a slice: what comes of it when the slice is taken away.

There is no cloud here; gcloud_program.py stands in for it.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import chips
import pytest
from encode_stage import digests_of, encode_images, encode_recipe, images_of, pictures_of
from gcloud_program import make_world, told
from jobs import SETTINGS, MakeJob, outputs
from training import train

from artifacts.store import Store
from configs.errors import Away, Refused
from configs.settings.clusters import Tpu
from runtimes.process.job import write_job
from tasks.hosts.attempts import run_on_hosts
from tasks.hosts.engine import Agents
from tasks.hosts.gcloud import GcloudEngine, Slice

pytestmark = pytest.mark.slow

SLICE: dict[str, Any] = {"name": "kiln", "zone": "us-east5-a", "accelerator_type": "v5p-8"}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cloud whose slices have one worker."""
    return make_world(tmp_path, monkeypatch)


def train_on_slice(tpu: Tpu, job: Any, on_event: Any, store: Store) -> None:
    engine = GcloudEngine(Slice(tpu, "a-run"), "jax", poll_seconds=0.1)
    agents = Agents(1, "", 30.0, "python")
    run_on_hosts(engine, job, on_event, agents=agents, store=store, cluster=tpu)


def run_on_slice(job: Any, tmp_path: Path, **tpu: Any) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    store = Store(str(tmp_path / "store"))
    train_on_slice(Tpu(**SLICE, **tpu), job, events.append, store)
    return events


@pytest.mark.extended
def test_a_slice_that_is_taken_away_is_made_anew_and_training_goes_on(
    world: Path, make_job: MakeJob, tmp_path: Path
) -> None:
    whole = make_job("whole", **SETTINGS)
    train(whole)
    job = make_job("slice", **SETTINGS)
    (world / "run").symlink_to(job.work)
    (world / "spot").touch()
    events = run_on_slice(job, tmp_path)
    starts = [event["step"] for event in events if event["event"] == "start"]
    assert starts[0] == 0 < starts[1] and len(starts) == 2
    assert told(world).count("create") == 2 and told(world)[-1] == "delete"
    assert outputs(job) == outputs(whole)
    assert not (world / "state").exists()


def test_a_fault_of_the_job_ends_it_and_the_slice(
    world: Path, make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job("wrong", model=str(tmp_path))
    with pytest.raises(Refused, match="model_index"):
        run_on_slice(job, tmp_path)
    assert told(world).count("create") == 1 and told(world)[-1] == "delete"


@pytest.mark.soak
def test_a_slice_that_is_there_is_used_and_may_be_kept(
    world: Path, make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job("one", steps=2)
    run_on_slice(job, tmp_path, keep=True)
    run_on_slice(make_job("two", steps=2), tmp_path, keep=True)
    assert told(world).count("create") == 1 and "delete" not in told(world)


@pytest.mark.soak
def test_too_many_preemptions_are_an_error(world: Path, make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job("often", **{**SETTINGS, "steps": 5000})  # it never ends before it is taken away
    (world / "run").symlink_to(job.work)
    (world / "spot").write_text("2")  # the second time before a new checkpoint
    with pytest.raises(Away, match="the slice is PREEMPTED, in 1 attempts without"):
        run_on_slice(job, tmp_path, restarts=0)


LAUNCH = """
import json, signal, sys
from pathlib import Path
from artifacts.store import Store
from configs.settings.clusters import Tpu
from runtimes.process.job import read_job
from test_on_a_slice import train_on_slice
signal.signal(signal.SIGINT, signal.default_int_handler)  # where a shell has us ignore it
tpu, job, store = sys.argv[1:]
on_event = lambda event: print(event["event"], flush=True)
train_on_slice(Tpu(**json.loads(tpu)), read_job(Path(job)), on_event, Store(store))
"""


@pytest.mark.soak
def test_a_run_that_is_interrupted_has_the_slice_checkpoint_and_deletes_it(
    world: Path, make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job("stopped", **{**SETTINGS, "steps": 100_000, "checkpointing_steps": 50_000})
    write_job(job, tmp_path / "job.json")
    given = (json.dumps(SLICE), str(tmp_path / "job.json"), str(tmp_path / "store"))
    command = [sys.executable, "-c", LAUNCH, *given]
    folders = [str(Path(__file__).parent), *(path for path in sys.path if path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, text=True, env=environment) as launcher:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            if line.strip() == "progress":
                launcher.send_signal(signal.SIGINT)
                break
        try:
            launcher.communicate(timeout=120)
        finally:
            launcher.kill()
    steps = [path.name for path in Path(job.work, "checkpoints").glob("step-*")]
    assert len(steps) == 1 and steps[0] != "step-00050000"
    assert told(world)[-1] == "delete" and not (world / "state").exists()


@pytest.mark.extended
def test_two_workers_of_a_slice_encode_apart_the_bytes_of_this_machine(
    tiny_sdxl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With runtime jax, whose process would wait for the other worker if they were together."""
    world = make_world(tmp_path, monkeypatch, hosts=2)
    monkeypatch.setenv("XLA_FLAGS", chips.FAST_COMPILATION)
    images = pictures_of(2, 4)

    def encode(name: str, **on_slice: Any) -> dict[str, str]:
        recipe = encode_recipe(tmp_path / name, tiny_sdxl).model_copy(update={"runtime": "jax"})
        recipe = recipe.model_copy(update=on_slice)
        if on_slice:
            section = recipe.encode.model_copy(update={"hosts": 2})
            recipe = recipe.model_copy(update={"encode": section})
        made = encode_images(recipe, images_of(Store(recipe.store), images, tmp_path))
        return digests_of(made)

    tpu = Tpu(**SLICE | {"accelerator_type": "v5p-16"})
    assert encode("slice", tpu=tpu) == encode("here")
    assert told(world).count("create") == 1 and told(world)[-1] == "delete"
