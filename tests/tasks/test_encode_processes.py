"""Encoder processes encode what this process would, and end with their client."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import chips
import numpy as np
import pytest
from encoder_inputs import SQUARE, gradient
from kiln_command import ROOT

from artifacts.image_shards import Sample, write_tar
from artifacts.records import Damaged, digest_bytes
from bench.stand_in_encoder import NAME, registered
from configs.errors import Away, Failed, Refused
from runtimes import registry as devices
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import EncodeJob
from runtimes.registry import devices_of, interpreter
from runtimes.torch_models.vae_text_encoders import Encoder
from tasks.child_process import ProcessLost
from tasks.devices.processes import DeviceProcess
from tasks.encode.encoders import EncodingPlan, encode_request
from tasks.pictures import PictureShard

CAPTIONS = ["a red cat", "", "a dog"]


def request_of(tar: str, sha256: str) -> dict[str, Any]:
    return encode_request("key", PictureShard(tar, tar, sha256, 6))


def start() -> DeviceProcess:
    """A process whose encoders return zeros: it starts without PyTorch."""
    plan = EncodingPlan(EncodeJob(NAME, "0.0", batch_size=4, device="cpu"), SQUARE)
    with registered():
        process = DeviceProcess(plan, module="bench.stand_in_encoder")
    process.wait()
    return process


@pytest.fixture(scope="module")
def process() -> Iterator[DeviceProcess]:
    """Shared by the tests; the last one kills it."""
    started = start()
    yield started
    started.process.close()


@pytest.fixture
def tar(tmp_path: Path) -> tuple[str, str]:
    """Path and sha256 of a tar with six pictures."""
    path = tmp_path / "shard.tar"
    pictures = [gradient(80 + number, 90) for number in range(6)]
    write_tar(
        path,
        [
            Sample(f"{number}", data, "png", ("a cat",), {"sha256": digest_bytes(data)})
            for number, data in enumerate(pictures)
        ],
    )
    return str(path), digest_bytes(path.read_bytes())


def test_an_error_of_a_shard_ends_no_process(
    process: DeviceProcess, tar: tuple[str, str], tmp_path: Path
) -> None:
    encode = process.slots[0]
    folder = str(tmp_path)
    facts = encode(request_of(*tar), folder)
    assert facts["key"]["groups"] == {"train/8x8": 6}
    with pytest.raises(Damaged, match=r"shard\.tar is damaged"):
        encode(request_of(tar[0], "0" * 64), folder)
    Path(tar[0]).write_bytes(b"no tar" * 1000)
    with pytest.raises(Failed, match=r"ValueError: .*not a readable tar"):
        encode(request_of(tar[0], digest_bytes(b"no tar" * 1000)), folder)
    with pytest.raises(Failed, match="FileNotFoundError"):
        encode(request_of(f"{folder}/absent.tar", tar[1]), folder)


@pytest.mark.slow
def test_an_outage_of_the_store_has_its_type(s3_away: None, tmp_path: Path) -> None:
    process = start()
    with pytest.raises(Away, match=r"^s3://shards cannot be used now \(Could not connect"):
        process.slots[0](request_of("s3://shards/shard.tar", "0" * 64), str(tmp_path))
    process.process.close()


@pytest.mark.slow
def test_a_process_ends_when_its_client_does_even_while_it_reads(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "endless.tar")
    process = start()
    request = request_of(f"{tmp_path}/endless.tar", "")
    process.process.send(json.dumps({"request": request, "folder": ""}).encode(), 1)
    writer = os.open(tmp_path / "endless.tar", os.O_WRONLY)  # returns once the process reads
    assert process.process.close() == 0
    os.close(writer)


@pytest.mark.slow
def test_every_slot_of_a_dead_process_is_lost(
    process: DeviceProcess, tar: tuple[str, str], tmp_path: Path
) -> None:
    os.kill(process.process.pid, signal.SIGKILL)
    for encode in process.slots:
        with pytest.raises(ProcessLost, match=r"^the encode process ended with -9: "):
            encode(request_of(*tar), str(tmp_path))


@pytest.mark.slow
def test_a_wrong_model_is_wrong_input(tmp_path: Path) -> None:
    job = EncodeJob("torch", str(tmp_path), device="cpu")
    process = DeviceProcess(EncodingPlan(job, SQUARE))
    with pytest.raises(Refused, match=r"model_index\.json"):
        process.wait()
    process.process.close()


#: The one family of a runtime, or of a variant of one, that is not left to `make soak`.
ONCE = {"jax": "sdxl", "xla": "sd", "mindspore": "sdxl", "hpu-lazy": "sd"}


def _tier(runtime: str, family: str) -> list[pytest.MarkDecorator]:
    """Encoding on jax is in `make test`."""
    if ONCE.get(runtime) != family:
        return [pytest.mark.soak]
    return [] if runtime == "jax" else [pytest.mark.extended]


OTHER_CAPTIONS = ["a blue cat", "two", "a fog"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runtime", "family"),
    [
        pytest.param(name, family, marks=_tier(name, family))
        for name in chips.VARIANTS
        for family in ("sd", "sdxl")
        if name != "torch"
    ],
)
def test_every_runtime_encodes_alike(
    runtime: str, family: str, tiny_sd: Path, tiny_sdxl: Path, tmp_path: Path
) -> None:
    """Whole batches and a last, smaller one; other pictures and captions give other numbers."""
    chips.require(runtime)
    folder = {"sd": tiny_sd, "sdxl": tiny_sdxl}[family]
    pixels = np.random.default_rng(0).uniform(-1, 1, (4, 3, 32, 32)).astype(np.float32)
    found = _encoded_by(chips.VARIANTS[runtime], runtime, folder, pixels, tmp_path)
    here = Encoder(Base.open(folder), device="cpu")
    names = ("mean", "logvar", "states", "pooled")
    expected = dict(zip(names, (*here.images(pixels), *here.texts(CAPTIONS)), strict=True))
    for name, one in expected.items():
        assert (one is None) == (f"{name}4" not in found)  # as SD's pooled embeddings are
        if one is not None:
            np.testing.assert_allclose(found[f"{name}4"], one, rtol=1e-4, atol=1e-4)
            # A padded batch runs the program of a whole one.
            np.testing.assert_array_equal(found[f"{name}3"], found[f"{name}4"][:-1])
    others = (*here.images(pixels[::-1].copy()), *here.texts(OTHER_CAPTIONS))
    for one, other in zip(expected.values(), others, strict=True):
        if one is not None and other is not None:
            assert np.abs(one - other).max(axis=tuple(range(1, one.ndim))).min() > 0.1


def _encoded_by(
    on: chips.Variant, name: str, model: Path, pixels: np.ndarray, folder: Path
) -> dict[str, np.ndarray]:
    job = EncodeJob(on.runtime, str(model), batch_size=4, device=on.device)
    (folder / "job.json").write_text(json.dumps(asdict(job)))
    np.savez(folder / "in.npz", pixels=pixels, captions=CAPTIONS)
    files = [str(folder / file) for file in ("job.json", "in.npz", "out.npz")]
    with chips.standing_in(name):
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
        subprocess.run(
            [interpreter(on.runtime), str(ROOT / "tests/encode_with.py"), *files],
            check=True,
            env={**os.environ, "PYTHONPATH": path},
        )
    return dict(np.load(folder / "out.npz"))


def test_every_accelerator_has_an_encoder_process(monkeypatch: pytest.MonkeyPatch) -> None:
    present = {"cuda": 4, "npu": 2, "ascend": 2, "hpu": 8}
    monkeypatch.setattr(devices, "_count", lambda kind: present.get(kind, 0))

    def of(runtime: str, device: str, processes: int | None = None) -> list[str]:
        return devices_of(runtime, device, processes)

    assert of("torch", "auto") == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert of("torch", "cuda", 2) == ["cuda:0", "cuda:1"]
    assert of("torch", "cuda:1") == ["cuda:1"] and of("torch", "npu") == ["npu:0", "npu:1"]
    assert len(of("torch", "hpu")) == 8 and of("mindspore", "ascend") == ["ascend:0", "ascend:1"]
    assert of("torch", "cpu") == ["cpu"] and of("torch", "cpu", 3) == ["cpu"] * 3
    assert of("jax", "auto") == ["auto"] and of("xla", "auto") == ["auto"]
    present.clear()
    assert of("torch", "auto") == ["cpu"] and of("torch", "hpu") == ["hpu"]
    for runtime, device in (("torch", "cuda:0"), ("jax", "tpu"), ("torch", "npu")):
        with pytest.raises(Refused, match=r"encode\.processes: device .* 1 of the 2"):
            of(runtime, device, 2)
