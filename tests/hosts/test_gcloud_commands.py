"""The gcloud commands of a slice, the code it gets, and what is refused before it is paid."""

import io
import re
import shlex
import tarfile
from pathlib import Path
from typing import Any

import pytest

from artifacts.store import Store
from configs.errors import Refused
from configs.load_recipe import load_recipe
from configs.settings.clusters import Tpu
from configs.settings.recipe import Recipe
from runtimes.spmd.tpu_sharding import parse_accelerator_type
from tasks.hosts import attempts, choose, gcloud
from tasks.hosts.gcloud import Slice, hosts_of, pack_code

SLICE: dict[str, Any] = {"name": "kiln", "zone": "us-east5-a", "accelerator_type": "v5p-16"}


def test_the_commands_have_the_recipes_settings() -> None:
    tpu = Tpu(**SLICE, project="mine", capacity="spot", queued=True, service_account="a@b")
    there = Slice(tpu, "a-run")
    assert " ".join(there.create()) == (
        "gcloud compute tpus queued-resources create kiln --zone=us-east5-a --project=mine "
        "--accelerator-type=v5p-16 --runtime-version=v2-alpha-tpuv5 --node-id=kiln --spot "
        "--labels=kiln_run=a-run --service-account=a@b"
    )
    assert " ".join(there.delete()) == (
        "gcloud compute tpus queued-resources delete kiln --zone=us-east5-a --project=mine "
        "--force --quiet"
    )
    reserved = Slice(Tpu(**SLICE, capacity="reserved"), "a-run")
    assert " ".join(reserved.create()) == (
        "gcloud compute tpus tpu-vm create kiln --zone=us-east5-a --accelerator-type=v5p-16 "
        "--version=v2-alpha-tpuv5 --reserved --labels=kiln_run=a-run"
    )
    assert reserved.describe()[-1] == "--format=value(state,labels.kiln_run)"
    assert not [one for one in Slice(Tpu(**SLICE, keep=True), "a-run").create() if "label" in one]
    assert reserved.ssh("ls")[-1] == "--command=ls" and "--worker=all" in reserved.ssh("ls")
    for command, flag in ((reserved.ssh("ls"), "ssh"), (reserved.copy(Path("a"), "b"), "scp")):
        assert f"--{flag}-flag=-oServerAliveInterval=30" in command
    assert reserved.copy(Path("job.json"), "home/job.json")[-2:] == [
        "kiln:home/job.json",
        "--worker=all",
    ]


@pytest.mark.parametrize("name", ["compute", "tpus", "scp"])
def test_a_slice_may_be_named_like_a_word_of_gcloud(name: str) -> None:
    copy = Slice(Tpu(**(SLICE | {"name": name})), "a-run").copy(Path("job.json"), "there")
    assert copy[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "scp", "job.json"]
    assert f"{name}:there" in copy


def test_the_packed_code_is_complete_and_deterministic() -> None:
    packed = pack_code()
    assert packed == pack_code()
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        names = tar.getnames()
    assert {"deploy/tpu/worker.sh", "runtimes/__main__.py", "requirements/xla.txt"} <= set(names)
    assert "tasks/devices/host_shards.py" in names
    assert not [name for name in names if name.startswith(("tests", "flows", "demo"))]


def test_a_slice_gets_no_file_of_variables_from_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("deploy/tpu/setup.sh", "deploy/server/.env", "deploy/worker.env"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("S3_SECRET=secret")
    monkeypatch.setattr(gcloud, "CHECKOUT", tmp_path)
    with tarfile.open(fileobj=io.BytesIO(pack_code())) as tar:
        assert tar.getnames() == ["deploy/tpu/setup.sh"]


def test_a_slice_gets_the_files_of_a_linked_folder(tmp_path: Path) -> None:
    shared, model = tmp_path / "shared", tmp_path / "model"
    for folder in (shared, model):
        folder.mkdir()
    (shared / "config.json").write_text("{}")
    (model / "vae").symlink_to(shared)
    copy = attempts.in_store(Store(str(tmp_path / "store")), str(model))
    assert Path(copy, "vae/config.json").read_text() == "{}"


def verbs(runtime: str = "jax", **settings: Any) -> list[str]:
    """The verbs of the gcloud commands, in order; for a shell command, its script."""
    listed = gcloud.list_commands(Tpu(**SLICE, **settings), runtime, 2, 60.0)
    commands = [command for _, command in listed]
    scripts = [
        re.findall(r"deploy/tpu/(\w+)\.sh (\w+)", shlex.join(command[-1:])) for command in commands
    ]
    return [
        " ".join([command[4], *(word for words in script for word in words)])
        for command, script in zip(commands, scripts, strict=True)
    ]


@pytest.mark.parametrize("runtime", ["jax", "xla"])
def test_the_commands_are_in_the_order_of_a_run(runtime: str) -> None:
    made = ["describe", "create", "describe", "scp"]
    made += [f"ssh setup {runtime}", f"ssh worker {runtime}"]
    assert verbs(runtime) == [*made, "delete"]
    assert verbs(runtime, keep=True) == made
    assert verbs(runtime, keep=True, environment=["A"]) == [*made[:4], "scp", *made[4:]]


@pytest.mark.parametrize("runtime", ["jax", "xla"])
def test_a_workers_script_has_hosts_grace_and_flags_of_libtpu(runtime: str) -> None:
    listed = gcloud.list_commands(Tpu(**SLICE, libtpu_args="--a=b --c"), runtime, 2, 30.0)
    script = listed[-2][1][-1]
    assert "LIBTPU_INIT_ARGS='--a=b --c' bash kiln-" in script
    assert script.endswith(f"worker.sh {runtime} gs://STORE/train/KEY/jobs/ATTEMPT.json 2 30")


@pytest.mark.parametrize(
    ("kind", "software"),
    [
        ("v4-32", "tpu-ubuntu2204-base"),
        ("v5litepod-8", "v2-alpha-tpuv5-lite"),
        ("v5p-8", "v2-alpha-tpuv5"),
        ("v6e-16", "v2-alpha-tpuv6e"),
    ],
)
def test_a_slice_has_the_software_of_its_kind(kind: str, software: str) -> None:
    """As Cloud TPU's page "TPU software versions" lists them."""
    for queued, option in ((False, "--version"), (True, "--runtime-version")):
        tpu = Tpu(**{**SLICE, "accelerator_type": kind}, queued=queued)
        assert f"{option}={software}" in Slice(tpu, "a-run").create()


def test_software_of_its_own_is_kept() -> None:
    for kind in ("v6e-16", "v9-8"):
        tpu = Tpu(**{**SLICE, "accelerator_type": kind}, version="nightly")
        assert "--version=nightly" in Slice(tpu, "a-run").create()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"accelerator_type": "v6e-16", "version": "v2-alpha-tpuv5"}, "null (v2-alpha-tpuv6e)"),
        ({"accelerator_type": "v5p-8", "version": "v2-alpha-tpuv5-lite"}, "null (v2-alpha-tpuv5)"),
        ({"accelerator_type": "v5e-8"}, "gcloud calls it v5litepod-8"),
        ({"accelerator_type": "v9-8"}, "set version too"),
    ],
)
def test_unsupported_software_is_refused_before_gcloud(
    settings: dict[str, str], words: str
) -> None:
    overrides = {f"tpu.{name}": value for name, value in {**SLICE, **settings}.items()}
    with pytest.raises(Refused) as refused:
        load_recipe("sd2-v5p", overrides)
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("accelerator_type", "settings", "words"),
    [
        ("v5p-64", {"global_batch_size": 10}, "10 is not divisible by the 8 hosts of v5p-64"),
        ("v5p-64", {"global_batch_size": 48}, "6 samples of a host .* its 4 devices"),
        ("v5p-64", {"micro_batch_size": 6}, "6 samples of a host cannot be shared"),
        ("v5p-64", {"global_batch_size": 80, "micro_batch_size": 8}, "2 samples of a host"),
        ("v5p-64", {"fsdp": 5}, "train.fsdp 5 does not divide 32 devices"),
        ("v5p-9", {}, "topology v5p-9: no such slice .known: v5p-8, "),
        ("v5litepod-12", {}, "topology v5litepod-12: no such slice"),
        ("v5litepod-16", {"fsdp": 3}, "train.fsdp 3 does not divide 16 devices"),
        ("v5p-384", {"global_batch_size": 64}, "the 48 hosts of v5p-384"),
    ],
)
def test_a_batch_or_shards_that_the_slice_cannot_share_are_refused_before_it_is_paid(
    accelerator_type: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(Refused, match=words):
        tpu = Tpu(**{**SLICE, "accelerator_type": accelerator_type})
        gcloud.check(tpu, recipe(**settings), ["train"])


@pytest.mark.parametrize(
    ("accelerator_type", "stated", "hosts"),
    [
        ("v2-8", 1, 1),
        ("v3-32", 1, 4),
        ("v4-8", 1, 1),
        ("v5litepod-8", 1, 1),
        ("v5litepod-16", 1, 4),
        ("v5p-32", 1, 4),
        ("v6e-256", 1, 64),
        ("v9-64", 3, 3),
    ],
)
def test_a_slice_has_an_agent_on_each_machine(
    accelerator_type: str, stated: int, hosts: int
) -> None:
    """As Google Cloud's pages of the kinds list them; of an unknown kind, the recipe says it."""
    version = "nightly" if accelerator_type.startswith("v9") else None
    tpu = Tpu(**{**SLICE, "accelerator_type": accelerator_type}, version=version)
    assert hosts_of(tpu, stated) == hosts


@pytest.mark.parametrize(("name", "chips"), [("v5p-384", 192), ("v5p-2048", 1024), ("v2-8", None)])
def test_accelerator_types_without_a_plan_are_known_by_their_size(
    name: str, chips: int | None
) -> None:
    found = parse_accelerator_type(name)
    assert (found and (found.chips, found.hosts)) == (chips and (chips, chips // 4))


def test_what_a_slice_cannot_use_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gcloud").write_text("")
    (tmp_path / "gcloud").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)

    def refused(words: str, **overrides: Any) -> None:
        with pytest.raises(Refused, match=words):
            choose.check(load("digits", **overrides))

    refused("make it a gs:// URL", store="store")
    refused("mode offline", **{"train.wandb": {"project": "p"}})
    refused("one process has all chips", **{"train.processes": 2})
    refused("WANDB_API_KEY: not set here", **{"tpu.environment": ["WANDB_API_KEY"]})
    refused(r"encode\.hosts: a \S+ has \d+ hosts, not 99: set", **{"encode.hosts": 99})
    describe = {"describers": {"copies": {"kind": "hash"}}, "hosts": 2}
    refused(r"describe\.hosts: its models run by PyTorch", describe=describe)
    (found,) = choose.check(load("digits"))
    assert found.words.startswith("cluster: tpu, ")
    (tmp_path / "gcloud").unlink()
    refused("gcloud is not installed")
    refused("requires runtime jax or xla", runtime="torch")
    refused("hosts of a slice are those of", **{"train.hosts": 2})


def load(name: str, **overrides: Any) -> Recipe:
    """A recipe with the slice, and a store that it can read."""
    slice_settings = {f"tpu.{setting}": value for setting, value in SLICE.items()}
    common = {"runtime": "jax", "store": "gs://bucket/store"}
    return load_recipe(name, {**common, **slice_settings, **overrides})


def recipe(**train: Any) -> Recipe:
    """A recipe of runtime xla with settings of its training."""
    settings = {"global_batch_size": 96, "micro_batch_size": None, **train}
    return load("sd2-v5p", runtime="xla", **{f"train.{name}": v for name, v in settings.items()})
