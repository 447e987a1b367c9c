"""What only runtime xla has: one compilation, nothing on the host, state in parts on the devices.

XLA counts in its own process: each test runs a driver in the runtime's environment, on four virtual
devices of the CPU.
"""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import chips
import pytest

from runtimes.job import TrainJob, write_job
from runtimes.registry import interpreter
from tasks.process import run_job

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
MakeJob = Callable[..., TrainJob]
DEVICES = chips.ENVIRONMENT["xla"]
COMMON: dict[str, Any] = {
    "global_batch_size": 8,
    "lr_schedule": "cosine",
    "warmup_steps": 5,
    "ema_decay": 0.9,
    "log_every": 5,
    "mesh": {"fsdp": 2},
}


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    if reason := chips.reason_to_skip("xla"):
        pytest.skip(reason)


def drive(driver: str, *arguments: str, **more: str) -> dict[str, Any]:
    command = [interpreter("xla"), str(HERE / driver), *arguments]
    environment = {**os.environ, **DEVICES, **more}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def train(job: TrainJob, folder: Path, *arguments: str, **more: str) -> dict[str, Any]:
    write_job(job, folder / "job.json")
    return drive("train_driver.py", str(folder / "job.json"), *arguments, **more)


def test_fifty_steps_are_compiled_once_and_a_resume_compiles_nothing(
    make_job: MakeJob, tmp_path: Path
) -> None:
    """With a learning rate that changes, an average, checkpoints, metrics and a profile; the step
    is partitioned over four devices, and the state lies in parts."""
    profile = {"start": 40, "steps": 1}
    given = make_job(steps=50, checkpoint_every=10, keep_checkpoints=9, profile=profile, **COMMON)
    job, dump = replace(given, runtime="xla"), tmp_path / "hlo"
    flags = f"{DEVICES['XLA_FLAGS']} --xla_dump_to={dump} --xla_dump_hlo_as_text"
    found = train(job, tmp_path, "30", XLA_FLAGS=flags)
    first, second = found["by_step"]
    assert (len(first), len(second)) == (50, 20)
    assert sum(first) <= 2 and first[0] == 1, first  # the pictures have two sizes
    assert found["compiles"][1] == 0
    assert found["compiles"][0] <= 4  # and where the average begins
    assert found["fallbacks"] == []
    for group in ("weights", "exp_avg", "exp_avg_sq", "ema"):
        assert f"{group} unet.conv_in.weight" in found["shared"]
    assert list(Path(job.work, "profile").glob("**/*.xplane.pb"))

    headers = [path.open().readline() for path in dump.glob("*after_optimizations.txt")]
    assert any("num_partitions=4" in header for header in headers)


def test_what_is_compiled_has_the_same_key_in_another_process(
    make_job: MakeJob, write_latents: Callable[..., str], tmp_path: Path
) -> None:
    """On a CPU, XLA writes its cache and finds what is there, but cannot load it."""
    kept, latents = tmp_path / "compiled", write_latents(tmp_path / "one", [{"train/8x8": 9}])
    job = make_job(steps=1, latents=latents, **{**COMMON, "warmup_steps": 0})
    job = replace(job, runtime="xla", compiled=str(kept))
    assert train(job, tmp_path)["cache"]["PersistentCacheMiss"] > 0
    names = sorted(path.name for path in kept.glob("*/*"))
    again = replace(job, work=str(tmp_path / "again"), out=str(tmp_path / "again"))
    found = train(again, tmp_path)["cache"]
    assert found.get("PersistentCacheMiss", 0) == 0
    assert found["PersistentCacheDeserializeFailure"] == len(names) > 0
    assert sorted(path.name for path in kept.glob("*/*")) == names


@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_pictures_are_compiled_once_and_are_those_of_diffusers(
    family: str, tiny_sd: Path, tiny_sdxl: Path
) -> None:
    """For every scheduler, in batches that must be filled up for four devices."""
    found = drive("draw_driver.py", str({"sd": tiny_sd, "sdxl": tiny_sdxl}[family]))
    assert found["fallbacks"] == []
    assert set(found["drawn"]) == {
        "EulerDiscreteScheduler",
        "DDIMScheduler",
        "DPMSolverMultistepScheduler",
    }
    for name, one in found["drawn"].items():
        assert one["furthest"] <= 1e-3 < one["spread"], name
        assert one["second"] == 0, name
        assert one["other prompts differ"] > 1e-3


def test_rows_of_a_host_are_put_in_their_order() -> None:
    """Devices of a host need not have the lowest numbers, nor lie in the order of its rows."""
    code = (
        "import torch; from runtimes.xla.mesh import in_order; rows = torch.arange(8.);"
        "print(in_order([(6, rows[6:]), (4, rows[4:6]), (8, rows[8:])]).tolist())"
    )
    command = [interpreter("xla"), "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[4.0, 5.0, 6.0, 7.0]"


@pytest.mark.parametrize("devices", ["1", "4"])
def test_rows_come_back_as_they_were_sent(devices: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One device has them whole, and says so otherwise than several do."""
    for name, value in {**DEVICES, "CPU_NUM_DEVICES": devices}.items():
        monkeypatch.setenv(name, value)
    code = (
        "import numpy as np; from runtimes.xla.device import start; start('cpu', None)\n"
        "from runtimes.xla.mesh import Mesh; mesh = Mesh(fsdp=1, hosts=1)\n"
        "rows = np.arange(8, dtype=np.float32).reshape(4, 2)\n"
        "print(mesh.count, (mesh.fetch_rows(mesh.put_rows(rows) + 1) - 1 == rows).all().item())"
    )
    command = [interpreter("xla"), "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == f"{devices} True"


def test_half_precision_stays_near(make_job: MakeJob, tmp_path: Path) -> None:
    """With recomputed activations and trained text encoders."""
    settings = {"steps": 4, "log_every": 1, "global_batch_size": 8, "text_encoders": True}
    near = replace(make_job("near", **settings), runtime="torch")
    run_job(near)
    half = make_job("half", **settings, compute_dtype="bfloat16", gradient_checkpointing=True)
    job = replace(half, runtime="xla")
    train(job, tmp_path)
    assert losses(job) == pytest.approx(losses(near), rel=2e-2)
    assert losses(job) != losses(near)


def losses(job: TrainJob) -> list[float]:
    lines = (Path(job.out) / "history.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]
