"""A run of two hosts by ssh, whose stand-in runs the commands on this machine."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import published
import pytest
import ssh_hosts
from waiting import wait_until

from configs.load_recipe import load_recipe
from runtimes.process.collectives import free_port

pytestmark = pytest.mark.slow
Overrides = dict[str, Any]
RunHere = Callable[..., dict[str, Any]]


@pytest.fixture
def hosts(
    small: Overrides,
    tiny_model: Callable[[str], Path],
    tiny_clip: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Overrides:
    """Overrides of `digits` for two hosts and a few steps of a tiny model."""
    ssh_hosts.stand_in(tmp_path, monkeypatch)
    return {
        **small,
        "model.path": str(tiny_model("least-sdxl")),
        "evaluate.clip": str(tiny_clip),
        "evaluate.judges": [],
        "train.steps": 120,
        "train.lr_warmup_steps": 2,
        "train.checkpointing_steps": 20,
        "train.sample_every_n_steps": 0,
        "train.grace_seconds": 5,
        "train.hosts": 2,
        "ssh": {
            "hosts": ["one", "two"],
            "address": "127.0.0.1",
            "port": free_port(),
            "silence_seconds": 10,
        },
    }


def on_one_host(overrides: Overrides, report: published.Report, out: Path) -> Path:
    """The folder of the same training by two processes of this machine."""
    settings = {**overrides, "train.hosts": 1, "train.processes": 2, "ssh": None}
    return published.train_apart(load_recipe("digits", settings), report, out)


def assert_alike(run: Path, alone: Path) -> None:
    name = "unet/diffusion_pytorch_model.safetensors"
    assert (run / name).read_bytes() == (alone / name).read_bytes()
    assert published.history(run)[-1]["loss"] == published.history(alone)[-1]["loss"]


def test_two_hosts_train_a_published_model_through_a_loss(
    hosts: Overrides, run_here: RunHere, tmp_path: Path
) -> None:
    store = Path(hosts["store"])

    def kill_second_host() -> None:
        """As a lost power: agent and ranks of host 1, after the first checkpoint."""
        wait_until(lambda: any(store.glob("train/*/checkpoints/step-00000020/manifest.json")), 300)
        for pid in processes_of_host(1, store):
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_second_host)
    killer.start()
    report = run_here("digits", hosts)
    killer.join()
    assert report["status"] == "published"
    assert published.manifest(report, "train")["run"]["resumed_from"] >= 20
    alone = on_one_host(hosts, report, tmp_path / "alone")
    assert_alike(published.folder(report, "train"), alone)


def processes_of_host(number: int, store: Path) -> list[int]:
    """Ids of a host's agent, which is first, and of its ranks; their job is in the store."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
            variables = (entry / "environ").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        if not any(word.startswith(f"{store}/train/") for word in words):
            continue
        if "--host" in words and words[words.index("--host") + 1] == str(number):
            found.insert(0, int(entry.name))
        elif f"NODE_RANK={number}" in variables:
            found.append(int(entry.name))
    return found


def test_a_host_that_cannot_be_reached_is_refused_before_the_download(
    hosts: Overrides, here: Callable[..., str], api: str
) -> None:
    settings = {**hosts, "ssh": {**hosts["ssh"], "hosts": ["one", "away"]}}
    said = here("run", "digits", overrides=settings, code=2, api=api)
    assert "ssh.hosts: away: ssh: connect to host away port 22: Connection refused" in said
    assert not Path(hosts["store"], "download").exists()


def test_a_store_that_a_host_lacks_is_refused_before_the_download(
    hosts: Overrides, here: Callable[..., str], api: str
) -> None:
    settings = {**hosts, "ssh": {**hosts["ssh"], "hosts": ["one", "apart"]}}
    said = here("run", "digits", overrides=settings, code=2, api=api)
    assert f"store: apart does not share {hosts['store']}: set a folder that all hosts" in said
    assert not Path(hosts["store"], "download").exists()
